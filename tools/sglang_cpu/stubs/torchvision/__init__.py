"""Stand-in for torchvision, whose wheels are built for one build of torch each."""

from stand_in import stand_in_for

__version__ = "0.0.0"
__getattr__ = stand_in_for(__name__)
