"""KV events about the store, as an index of prefixes reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from store_fakes import PAGE, Vllm, hash_of, puts
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvspray_vllm import events
from kvspray_vllm.events import MAX_EVENTS, StoreEvents

PROMPT = list(range(30))


class Index:
    """Pages by hash, each with its parent and tokens: what a listener learns."""

    def __init__(self, source: StoreEvents) -> None:
        self.source = source
        self.pages: dict[Any, tuple[Any, tuple[int, ...]]] = {}

    def read(self) -> Index:
        for e in self.source.take():
            assert (e.medium, e.ownership, e.locality) == ("CPU", "kvspray", "LOCAL")
            if isinstance(e, BlockStored):
                assert e.block_size == PAGE and len(e.token_ids) == PAGE * len(
                    e.block_hashes
                ) == PAGE * len(e.extra_keys or ())
                parent = e.parent_block_hash
                for i, h in enumerate(e.block_hashes):
                    self.pages[h] = (parent, tuple(e.token_ids[i * PAGE : (i + 1) * PAGE]))
                    parent = h
            else:
                assert isinstance(e, BlockRemoved)
                for h in e.block_hashes:
                    self.pages.pop(h, None)
        return self

    def prefix(self, h: Any) -> list[int]:
        parent, tokens = self.pages[h]
        return [*(self.prefix(parent) if parent is not None else ()), *tokens]


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    # The fakes' requests lack what adapters and images need.
    monkeypatch.setattr(
        events.kv_cache_utils, "generate_block_hash_extra_keys", lambda r, a, b, at: (None, at)
    )
    return Index(StoreEvents())


@pytest.mark.parametrize("ranks", [1, 2])
def test_events_describe_what_the_store_has(index: Index, ranks: int) -> None:
    v = Vllm(blocks=60, ranks=ranks, events=index.source)
    v.run("a", PROMPT, answer=7)
    v.run("b", [*PROMPT[:10], *PROMPT])
    index.read()
    assert index.pages.keys() == {h for _, h in v.store.pages[0]}
    for h in index.pages:
        assert hash_of(index.prefix(h)) == h


def test_a_page_is_published_once_all_ranks_have_put_it(index: Index) -> None:
    v = Vllm(blocks=60, ranks=2, events=index.source)
    v.add("a", PROMPT)
    for _ in range(3):
        v.step()
    assert not index.read().pages, "rank 1 has not reported"
    v.drain()
    assert index.read().pages


def test_a_page_that_is_gone_is_taken_back_when_it_is_asked_for(index: Index) -> None:
    v = Vllm(blocks=60, events=index.source)
    v.run("a", PROMPT)
    first = hash_of(PROMPT[:PAGE])
    del v.store.pages[0][("w0", first)]
    v.add("b", PROMPT)
    v.step()
    assert first not in index.read().pages
    v.drain()
    assert index.read().pages.keys() == {h for _, h in v.store.pages[0]}, "it is put again"


def test_pages_of_another_engine_are_published_when_they_are_loaded(index: Index) -> None:
    v = Vllm(blocks=60)
    v.run("a", PROMPT)
    other = Vllm(blocks=60, events=index.source)
    other.store.pages[0].update(v.store.pages[0])
    other.run("first", PROMPT[:2], answer=1)  # the worker names its pages
    r = other.add("b", PROMPT)
    assert other.scheduler.matched(r, 0) == (28, True)
    assert not index.read().pages, "the pages may be another node's, and not come"
    other.drain()
    assert puts(other) == 1, "the page after the prompt, which nobody asked for"
    assert index.read().pages.keys() == {h for _, h in v.store.pages[0]}


def test_pages_that_do_not_come_are_not_published(index: Index) -> None:
    v = Vllm(blocks=60)
    v.run("a", PROMPT)
    other = Vllm(blocks=60, events=index.source)
    other.store.pages[0].update(v.store.pages[0])
    other.run("first", PROMPT[:2], answer=1)  # the worker names its pages
    r = other.add("b", PROMPT)
    assert other.scheduler.matched(r, 0) == (28, True)
    del other.store.pages[0][("w0", hash_of(PROMPT[:PAGE]))]
    for _ in range(20):
        other.step()
        assert index.read().pages.keys() <= {h for _, h in other.store.pages[0]}
    other.drain()
    assert hash_of(PROMPT[:PAGE]) in index.read().pages, "it was computed and put"


def test_a_put_that_ends_after_the_sidecar_has_changed_is_not_published(index: Index) -> None:
    v = Vllm(blocks=60, events=index.source)
    v.add("a", PROMPT)
    for _ in range(3):
        v.step()
    v.step()
    assert index.read().pages
    held = dict(v.side._puts)
    v.store.session += 1
    r = v.add("b", PROMPT)
    v.scheduler.matched(r, 0)
    assert not index.read().pages
    assert all(h.event is None for h in held.values())


def test_a_page_that_is_asked_for_while_it_is_put_can_be_taken_back_later(index: Index) -> None:
    v = Vllm(blocks=60, events=index.source)
    first = hash_of(PROMPT[:PAGE])
    event = index.source.describe(v.add("a", PROMPT), 0, 1, PAGE)
    index.source.gone([first])  # a question came first
    index.source.stored([first], event)
    assert first in index.read().pages
    index.source.gone([first])
    index.source.gone([first])
    assert not index.read().pages


def test_pages_beyond_the_bound_are_taken_back(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_ANNOUNCED", 4)
    v = Vllm(blocks=60, events=index.source)
    v.run("a", PROMPT, answer=7)
    assert len(v.store.pages[0]) == 9
    last = [hash_of([*range(n)]) for n in range(6 * PAGE, 10 * PAGE, PAGE)]
    assert sorted(index.read().pages) == sorted(last)


def test_other_weights_and_another_sidecar_take_all_back(index: Index) -> None:
    v = Vllm(blocks=60, events=index.source)
    v.run("a", PROMPT)
    assert index.read().pages
    v.change_weights("w1")
    v.run("b", PROMPT[:2], answer=1)
    assert not index.read().pages
    v.run("c", PROMPT)
    assert index.read().pages.keys() == {h for w, h in v.store.pages[0] if w == "w1"}
    v.store.pages[0].clear()
    v.store.session += 1
    v.run("d", PROMPT[:2], answer=1)
    assert not index.read().pages


def test_events_that_nobody_takes_are_bounded() -> None:
    source = StoreEvents()
    for i in range(MAX_EVENTS + 5):
        source.stored([i.to_bytes(32, "big")], BlockRemoved(block_hashes=[], medium=None))
    assert len(list(source.take())) == MAX_EVENTS and not list(source.take())


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (SimpleNamespace(kv_events_config=None), False),
        (SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=False)), False),
        (SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True)), True),
    ],
)
def test_only_an_engine_that_publishes_events_has_them(config: Any, want: bool) -> None:
    assert events.wanted(config) is want
