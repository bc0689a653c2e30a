"""Models that SGLang serves in tests only (SGLANG_EXTERNAL_MODEL_PACKAGE)."""
