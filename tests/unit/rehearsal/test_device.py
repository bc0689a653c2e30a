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
