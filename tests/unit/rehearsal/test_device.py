"""What is known of the values of the pretended device."""

import torch

from dapo_mega.rehearsal.device import DEVICE, PretendedDevice, known_of


def test_zeros_that_an_optimizer_makes_take_no_memory_here():
    """Its moments are as large as its weights. Of masks and routing maps, made of zeros, too, values count."""
    device = PretendedDevice()
    with device:
        weights = torch.empty(64, device=DEVICE)
        assert known_of(torch.zeros_like(weights)).tolist() == [0.0] * 64
        with device.holding("optimizer"):
            moments = torch.zeros_like(weights)
    assert known_of(moments) is None
    assert device.live["optimizer"] == 4 * 64


def test_a_depthwise_convolution_has_twice_its_operations_in_its_backward_pass():
    """Gated delta layers have one of thousands of channels."""
    device = PretendedDevice()
    with device:
        rows = torch.empty(1, 32, 100, device=DEVICE, requires_grad=True)
        weight = torch.empty(32, 1, 4, device=DEVICE, requires_grad=True)
        output = torch.nn.functional.conv1d(rows, weight, groups=32)
        assert device.flops == 2 * 4 * 32 * 97
        output.sum().backward()
    assert device.flops == 3 * 2 * 4 * 32 * 97


def test_a_storage_that_is_emptied_counts_no_more_until_it_is_filled():
    """As the outputs that Megatron drops until a layer's backward pass."""
    device = PretendedDevice()
    with device:
        output = torch.empty(64, device=DEVICE)
        storage, held = output.untyped_storage(), []
        for size in (0, 4 * 64):
            storage.resize_(size)
            device.resized(storage)
            held.append(device.live.total())
    assert held == [0, 4 * 64]
