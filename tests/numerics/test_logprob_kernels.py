"""The Triton kernels, run by Triton's interpreter, against the plain-torch arithmetic of a chunk of logits.

The interpreter has to be chosen before Triton is imported, so this file is also the program that runs the kernels:
`TRITON_INTERPRET=1 python test_logprob_kernels.py OUTPUT` writes every case's results.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dapo_mega.megatron import logprob_kernels, logprobs
from dapo_mega.megatron.fused_logprobs import CUDA_ROW_ALIGNMENT
from dapo_mega.megatron.logprobs import empty_statistics, gradient_coefficients

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """`rows` x `width` logits in a buffer of `padded` columns, of a slice that owns every other target."""

    rows: int
    width: int
    padded: int
    dtype: torch.dtype
    with_entropy: bool
    inverse_temperature: float = 1.0
    scale: float = 3.0

    def inputs(self):
        """Logits [n, v] and columns [n], -1 at odd rows."""
        generator = torch.Generator().manual_seed(self.width)
        buffer = (torch.randn(self.rows, self.padded, generator=generator) * self.scale).to(self.dtype)
        buffer[:, self.width :] = torch.inf  # Kernels read whole vectors, and may write back what they read.
        targets = torch.randint(0, self.width, (self.rows,), generator=generator)
        targets[1::2] = -1
        return buffer[:, : self.width], targets

    def coefficients(self, statistics, targets):
        """As for a normaliser that other ranks' columns raised by half a nat."""
        peak, total, weighted, _ = statistics
        generator = torch.Generator().manual_seed(1)
        factors = torch.randn(2, self.rows, generator=generator)
        entropy = total.log() - weighted / total
        normaliser = peak + total.log() + 0.5
        return gradient_coefficients(targets, self.inverse_temperature, normaliser, entropy, *factors)


CASES = [
    Case(rows, width, padded, dtype, with_entropy)
    for rows, width, padded in ((1, 1, 1), (5, 37, 40), (3, 4096, 4096), (4, 9001, 9024))
    for dtype in (torch.float32, torch.bfloat16)
    for with_entropy in (True, False)
] + [
    Case(4, 5000, 5000, torch.float32, True, inverse_temperature=100.0, scale=1e4),
    Case(4, 5000, 5000, torch.float32, True, inverse_temperature=0.01),
]


def evaluate(implementation, case, statistics_name):
    """Statistics, gradient, and the buffer's columns beyond the slice, before and after."""
    logits, targets = case.inputs()
    statistics = empty_statistics(case.rows, logits)
    settings = (targets, case.inverse_temperature)
    getattr(implementation, statistics_name)(logits, *settings, statistics, case.with_entropy)
    gradient, _ = case.inputs()
    beyond = gradient._base[:, case.width :] if gradient._base is not None else gradient[:, :0]
    before = beyond.clone()
    # Both implementations get the coefficients that torch's statistics make.
    exact = empty_statistics(case.rows, logits)
    logprobs.chunk_statistics_(case.inputs()[0], *settings, exact, True)
    implementation.chunk_gradient_(gradient, *settings, case.coefficients(exact, targets), case.with_entropy)
    return statistics, gradient, before, beyond


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    if not logprob_kernels.IS_AVAILABLE:
        pytest.skip("Triton is not installed")
    output = tmp_path_factory.mktemp("kernels") / "results.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, __file__, str(output)], env=environment, check=True, timeout=300)
    return torch.load(output)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]).partition("(")[2])
def test_kernels_agree_with_torch(interpreted, index):
    case = CASES[index]
    statistics, gradient, before, beyond = interpreted[index]
    expected_statistics, expected_gradient, _, _ = evaluate(logprobs, case, "chunk_statistics_")
    torch.testing.assert_close(statistics, expected_statistics, rtol=1e-5, atol=1e-5)
    bound = 1e-5 if case.dtype is torch.float32 else 2**-7
    # exp(x - z) of float32 x and z of this size is known to that relative accuracy only.
    largest = expected_statistics[0].abs().max().item()
    bound += 2**-22 * largest
    torch.testing.assert_close(gradient, expected_gradient, rtol=bound, atol=1e-6)
    assert torch.equal(before, beyond)


class Recorded(Exception):
    """In place of a launch: its positional arguments and its named ones."""


class Recorder:
    """Stands for a kernel."""

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, **named):
        raise Recorded(arguments, named)


def compiled_as_launched(monkeypatch, name, launch, *arguments):
    """The kernel `name` for the arguments that `launch` gives it, specialised as Triton does at a launch."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(logprob_kernels, name)
    with monkeypatch.context() as patch:
        patch.setattr(logprob_kernels, name, Recorder())
        with pytest.raises(Recorded) as recorded:
            launch(*arguments)
    positional, named = recorded.value.args
    num_warps, types = named.pop("num_warps"), {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}
    signature, divisible = {}, {}
    for index, (argument, value) in enumerate(zip(kernel.arg_names, positional, strict=False)):
        is_tensor = isinstance(value, torch.Tensor)
        signature[argument] = f"*{types[value.dtype]}" if is_tensor else "fp32" if isinstance(value, float) else "i32"
        if signature[argument] != "fp32" and (value.data_ptr() if is_tensor else value) % 16 == 0:
            divisible[index,] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(named, "constexpr")
    source = triton.compiler.ASTSource(kernel, signature, named, divisible)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}), num_warps


def machine_code(compiled, folder):
    """(registers of a thread, bytes of its stack, what each access of global or local memory moves)."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tools = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin"
    command = [tools / "cuobjdump", "--dump-resource-usage", binary]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage).groups())
    return registers, stack + local, Counter(re.findall(r"\b((?:LD|ST)[GL]\.[A-Z0-9_.]+)", compiled.asm["sass"]))


@pytest.mark.skipif(not logprob_kernels.IS_AVAILABLE, reason="Triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler")
@pytest.mark.parametrize(
    "width",
    [
        pytest.param(151936, id="a width of vectors"),
        pytest.param(50257, id="a width cut within a vector", marks=pytest.mark.whole_table),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_kernels_fill_a_hopper_gpu(monkeypatch, tmp_path, dtype, with_entropy, width):
    """Down to machine code, which needs no GPU: nothing is spilled, an SM of 65,536 registers is full of threads, and
    logits pass in accesses of 128 bits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows = torch.empty(2, -(-width // CUDA_ROW_ALIGNMENT) * CUDA_ROW_ALIGNMENT, dtype=dtype)
    given = (rows[:, :width], torch.zeros(2, dtype=torch.int64), 1.0, torch.empty(4, 2), with_entropy)
    for name, launch, block, stores in (
        ("_statistics_kernel", logprob_kernels.chunk_statistics, logprob_kernels.STATISTICS_BLOCK, 0),
        ("_gradient_kernel", logprob_kernels.chunk_gradient_, logprob_kernels.GRADIENT_BLOCK, 1),
    ):
        compiled, num_warps = compiled_as_launched(monkeypatch, name, launch, *given)
        registers, stack, accesses = machine_code(compiled, tmp_path)
        assert (stack, [access for access in accesses if access[2] == "L"]) == (0, []), f"{name} spills"
        # Statistics of float32 with entropies have twice as many bytes under way, and fill three quarters.
        limit = 40 if (name, dtype, with_entropy) == ("_statistics_kernel", torch.float32, True) else 32
        assert registers <= limit, f"{name} takes {registers} registers a thread"
        vectors = block * rows.element_size() // (num_warps * 32 * 16)
        wide = {access[:3]: number for access, number in accesses.items() if access.endswith(".128")}
        assert wide == {"LDG": vectors} | ({"STG": vectors} if stores else {}), f"{name}: {accesses}"


def test_the_module_can_be_imported_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.find_spec("dapo_mega.megatron.logprob_kernels")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.IS_AVAILABLE


def test_importing_the_policy_on_a_cpu_does_not_import_triton_itself():
    program = "import sys; import dapo_mega.megatron.fused_logprobs; assert 'triton' not in sys.modules"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, cwd=REPOSITORY, timeout=120).returncode == 0


if __name__ == "__main__":
    assert importlib.util.find_spec("triton") is not None
    torch.save([evaluate(logprob_kernels, case, "chunk_statistics") for case in CASES], sys.argv[1])
