from types import SimpleNamespace
from typing import Any

from kvspray_sglang.copies import MAX_SIZES, Copies


class FakeSpace:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class FakeLink:
    def __init__(self) -> None:
        self.spaces: list[FakeSpace] = []

    def add(self, regions: list[Any]) -> None:
        pass

    def space(self, *_: Any) -> FakeSpace:
        self.spaces.append(FakeSpace())
        return self.spaces[-1]


def page(n: int) -> Any:
    return SimpleNamespace(numel=lambda: n, element_size=lambda: 1, dtype="torch.uint8")


def test_the_oldest_size_goes() -> None:
    link: Any = FakeLink()
    copies = Copies(link, lambda *_: None)  # type: ignore[arg-type,return-value]
    for n in range(1, MAX_SIZES + 1):
        copies.space("kv", page(n))
    copies.space("kv", page(1))  # in use, so it is not the oldest
    copies.space("kv", page(MAX_SIZES + 1))
    assert [s.closed for s in link.spaces] == [0, 1] + [0] * (MAX_SIZES - 1)
    copies.space("kv", page(2))
    assert len(link.spaces) == MAX_SIZES + 2 and sum(s.closed for s in link.spaces) == 2
    copies.close()
