"""Installs dapo_mega. Install torch first: on a machine without a GPU its CPU build, on a cluster your CUDA build."""

from pathlib import Path

from setuptools import find_packages, setup

VERSION = next(
    line.split('"')[1]
    for line in (Path(__file__).parent / "dapo_mega" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

# The packages behind `tracking.backends`.
TRACKERS = {
    "wandb": ["wandb>=0.31,<1"],
    # The whole mlflow would bring a server, scikit-learn and an older pyarrow. SQLAlchemy and alembic are for its local
    # database.
    "mlflow": ["mlflow-skinny>=3.17,<4", "sqlalchemy>=2,<3", "alembic>=1.18,<2"],
    "trackio": ["trackio>=0.43,<1"],
}

setup(
    name="dapo_mega",
    version=VERSION,
    description="DAPO on Megatron-Core, the same code on a laptop's CPU and on a cluster",
    packages=find_packages(include=["dapo_mega", "dapo_mega.*"]),
    package_data={"dapo_mega.samples": ["viewer/*"], "dapo_mega.metrics": ["tables.md"]},
    python_requires=">=3.11,<3.14",
    install_requires=[
        "torch>=2.11,<2.15",
        # Megatron-Core needs Python 3.12 from 0.17 on.
        "megatron-core>=0.18.2,<0.20; python_version >= '3.12'",
        "megatron-core>=0.16.1,<0.17; python_version < '3.12'",
        "psutil>=5.9",  # Megatron's checkpoint writer dies without it
        "transformers>=5.12,<6",
        "tokenizers>=0.22",
        "datasets>=4,<6",
        "pyarrow>=17",
        "datasketch>=2,<3",  # MinHash of near duplicates
        "confusable-homoglyphs>=3.3,<4",  # letters of other scripts that look Latin
        "safetensors>=0.5",
        "numpy>=1.26",
        "math-verify>=0.9,<0.10",
        "latex2sympy2_extended>=1.11,<2",
        "antlr4-python3-runtime>=4.13.2,<4.14",
        "sympy>=1.13,<2",
        "pydantic>=2.9,<3",
        "PyYAML>=6",
        "aiohttp>=3.10,<4",
        "orjson>=3.10,<4",
        "pybase64>=1.4,<2",
        "tensorboard>=2.17",
        "rich>=13",
        "matplotlib>=3.9",
    ],
    # SGLang loads it in every server that runs in an environment with this package.
    entry_points={
        "sglang.srt.plugins": ["dapo_mega = dapo_mega.sglang_plugin:register"],
        # torchrun --rdzv-backend bound
        "torchrun.handlers": ["bound = dapo_mega.distributed.torchrun_rendezvous:handler"],
        "console_scripts": ["dapo-mega = dapo_mega.commands.main:main"],
    },
    extras_require={
        "gpu": [
            "transformer-engine[pytorch]>=2.16.1,<2.21; python_version >= '3.12'",
            "transformer-engine[pytorch]>=2.8,<2.12; python_version < '3.12'",  # What Megatron-Core 0.16 takes.
        ],
        # httpx is imported by renderers 0.1.12, which does not ask for it.
        "renderers": ["renderers>=0.1.12,<0.2", "httpx>=0.27,<1"],
        # Which scorers run an answer as code is known of this version: see rewards/reasoning_gym.py.
        "reasoning-gym": ["reasoning-gym>=0.1.25,<0.1.26"],
        "language": ["py3langid>=0.4,<1"],
        "wandb": TRACKERS["wandb"],
        "mlflow": TRACKERS["mlflow"],
        "trackio": TRACKERS["trackio"],
        "trackers": [package for packages in TRACKERS.values() for package in packages],
        "dev": [
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6,<4",
            "hypothesis>=6.100",
            "py3langid>=0.4,<1",
            "ruff>=0.9",
            "mypy>=1.13",
            # Runs the GPU kernels on the CPU, in its interpreter.
            "triton>=3.4; sys_platform == 'linux'",
            "types-PyYAML",
            "types-psutil",
        ],
    },
)
