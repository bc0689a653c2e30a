"""What engines on the CPU sample depends on the request's seed, not on the requests beside it."""

import pytest
import torch

from dapo_mega.sglang_plugin.cpu_determinism import hashed, product, product_and_sum


def murmur3(data):
    """MurmurHash3_x86_32 of words of four bytes, with seed 0, in whole numbers."""
    state = 0
    for at in range(0, len(data), 4):
        word = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) * 0x1B873593 % 2**32
        state ^= word
        state = ((state << 13 | state >> 19) * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_seeds_are_hashed_as_murmur_hash_does():
    assert murmur3(b"test") == 0xBA6BD213  # Of the algorithm's reference implementation.
    seeds, positions, columns = [0, 1, 2**63 - 1, 0x0123456789ABCDEF], [0, 7, 2**31, 40_000], [0, 1, 151_935]
    found = hashed(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    for row, seed, position in zip(found.tolist(), seeds, positions, strict=True):
        for value, column in zip(row, columns, strict=True):
            words = [seed.to_bytes(8, "little"), position.to_bytes(4, "little"), column.to_bytes(4, "little")]
            assert value == murmur3(b"".join(words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_a_row_is_rounded_depends_on_no_other_row(dtype):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(33, 896, generator=generator).to(dtype)
    right = torch.randn(300, 896, generator=generator).to(dtype).t()
    alone = product(left[:1], right)[0]
    # Processors add the 896 products in different orders.
    exact = (left.double() @ right.double()).to(dtype)
    rounding = {"rtol": float(torch.finfo(dtype).eps), "atol": 896 * torch.finfo(torch.float32).eps}
    torch.testing.assert_close(product(left, right), exact, **rounding)
    assert product(left[:0], right).shape == (0, 300)
    for num_rows in (2, 3, 8, 9, 33):
        for place in (0, num_rows // 2, num_rows - 1):
            among = left[torch.randperm(33, generator=generator)[:num_rows]].clone()
            among[place] = left[0]
            assert torch.equal(product(among, right)[place], alone)


def test_what_is_added_counts_as_torch_counts_it():
    added, left, right = torch.arange(3.0), torch.randn(5, 4), torch.randn(4, 3)
    for weights in ({}, {"beta": 2.0, "alpha": 0.5}):
        torch.testing.assert_close(
            product_and_sum(added, left, right, **weights), torch.addmm(added, left, right, **weights)
        )
