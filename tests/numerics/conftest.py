"""Numbers are compared in float32: without TF32, which Transformer Engine multiplies float32 in. Read by cuBLAS when a
process uses a GPU for the first time."""

import os

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
