"""Which source is asked when others fail."""

from __future__ import annotations

from rank_worker.device_sensors.reading import ChipReading, NodeReading
from rank_worker.device_sensors.source import taken_now
from rank_worker.device_sensors.source_chain import SourceChain


class Switched:
    """A source that works or fails as told."""

    def __init__(self, name: str, works: bool) -> None:
        self.name = name
        self.works = works
        self.reads = 0
        self.open = True

    def read(self) -> NodeReading:
        self.reads += 1
        if self.works:
            return taken_now(self.name, (ChipReading(0, 0),))
        return taken_now(self.name, error=f"{self.name} is broken; mend it")

    def close(self) -> None:
        self.open = False


def test_the_next_source_answers_at_once_and_the_first_comes_back() -> None:
    now = [0.0]
    best, second = Switched("best", False), Switched("second", True)
    chain = SourceChain([best, second], lambda: now[0])
    for _ in range(60):
        assert chain.read().source == "second"
        now[0] += 1
    assert best.reads == 7  # after 1, 2, 4, 8, 15, 15 s
    best.works = True
    now[0] += 15
    assert chain.read().source == "best"
    best.works = False
    now[0] += 1
    assert chain.read().source == "second"
    now[0] += 1
    assert chain.read().source == "second"
    assert best.reads == 10  # the back-off started over


def test_without_an_answer_all_errors_are_told() -> None:
    now = [0.0]
    chain = SourceChain([Switched("a", False), Switched("b", False)], lambda: now[0])
    for _ in range(2):  # the second time both rest
        reading = chain.read()
        assert (reading.source, reading.chips) == (None, ())
        assert reading.error == "a is broken; mend it; also: b is broken; mend it"


def test_no_source_at_all_says_what_to_install() -> None:
    error = SourceChain([]).read().error
    assert error is not None
    assert "install the driver" in error


def test_closing_reaches_all() -> None:
    sources = [Switched("a", True), Switched("b", True)]
    SourceChain(sources).close()
    assert not any(source.open for source in sources)
