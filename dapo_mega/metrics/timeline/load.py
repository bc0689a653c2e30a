"""How many things of one kind are open over time, in a bounded number of segments."""

from dapo_mega.metrics.timeline.records import Load

_MOST_SEGMENTS, _LEAST_SEGMENTS, _SEGMENTS_OF_ALL = 16, 4, 512
_MOST_HELD = 4 * _MOST_SEGMENTS


def segments_each(num_histories: int) -> int:
    """The most segments of each of so many histories in one record: 512 of all together, but 4 to 16 of each."""
    return max(_LEAST_SEGMENTS, min(_MOST_SEGMENTS, _SEGMENTS_OF_ALL // max(num_histories, 1)))


class LoadHistory:
    """Counts what is open. All times are seconds of one clock and must not fall. `busy_s` is how long any was open
    since the beginning, and `open_s` how long all were together.

    A segment is a time with a constant number, or where there are too many, with its mean: then the shortest
    neighbours are put together, so long phases keep their edges. No time is lost and the mean stays exact.
    """

    def __init__(self, now: float) -> None:
        self.num_open = 0
        self.busy_s = self.open_s = 0.0
        self._since = now
        self._segments: list[Load] = []
        self._resolution = 0.0

    def change(self, now: float, by: int) -> None:
        """`by` more are open from now on."""
        self._advance(now)
        self.num_open += by

    def pop(self, now: float, max_segments: int = _MOST_SEGMENTS) -> list[Load]:
        """The segments since the last call, without gaps, at most `max_segments` (3 or more)."""
        self._advance(now)
        found, self._segments, self._resolution = self._segments, [], 0.0
        return _shortened(found, max_segments)[0]

    def _advance(self, now: float) -> None:
        if now <= self._since:
            return
        _append(self._segments, Load(self._since, now, float(self.num_open)), self._resolution)
        self.busy_s += (now - self._since) * bool(self.num_open)
        self.open_s += (now - self._since) * self.num_open
        self._since = now
        if len(self._segments) > _MOST_HELD:
            self._segments, self._resolution = _shortened(self._segments, _MOST_HELD // 2)


def _shortened(segments: list[Load], most: int) -> tuple[list[Load], float]:
    """At most `most` segments, and the resolution with which they were joined: the finest of a few that suffices."""
    resolution = 0.0
    for share in (0.5, 1, 2, 3):  # Any two neighbours last longer than the resolution, so 3 shares always suffice.
        if len(segments) <= most:
            break
        resolution = share * (segments[-1].end - segments[0].start) / most
        joined: list[Load] = []
        for segment in segments:
            _append(joined, segment, resolution)
        segments = joined
    return segments, resolution


def _append(segments: list[Load], new: Load, resolution: float) -> None:
    """Add a segment, as a part of the last one if both have one number or last no longer than `resolution`."""
    last = segments[-1] if segments else None
    if last is None or (new.mean != last.mean and new.end - last.start > resolution):
        segments.append(new)
        return
    mean = new.mean
    if new.mean != last.mean:
        opened = last.mean * (last.end - last.start) + new.mean * (new.end - new.start)
        mean = opened / (new.end - last.start)
    segments[-1] = Load(last.start, new.end, mean)
