from inlay.engine.torch.cache.prefix_cache import PrefixCache


def test_a_digest_is_found_in_its_page_until_it_is_forgotten() -> None:
    cache = PrefixCache()
    assert cache.insert(b"a", 3)
    assert cache.find(b"a") == 3
    assert 3 in cache
    assert cache.forget(3)
    assert cache.find(b"a") is None
    assert not cache.forget(3)


def test_the_first_page_of_a_digest_keeps_it() -> None:
    cache = PrefixCache()
    assert cache.insert(b"a", 3)
    assert not cache.insert(b"a", 4)
    assert cache.find(b"a") == 3
    assert 4 not in cache


def test_a_page_has_one_digest() -> None:
    cache = PrefixCache()
    assert cache.insert(b"a", 3)
    assert not cache.insert(b"b", 3)
    assert cache.find(b"b") is None


def test_held_pages_are_never_evicted() -> None:
    cache = PrefixCache()
    cache.insert(b"a", 3)
    assert cache.evict() is None
    cache.mark_idle(3)
    cache.mark_used(3)
    assert cache.evict() is None
    assert cache.find(b"a") == 3


def test_the_least_recently_used_idle_page_goes_first() -> None:
    cache = PrefixCache()
    for page, digest in enumerate((b"a", b"b", b"c")):
        cache.insert(digest, page)
        cache.mark_idle(page)
    cache.mark_used(0)
    cache.mark_idle(0)
    assert [cache.evict(), cache.evict(), cache.evict(), cache.evict()] == [1, 2, 0, None]
    assert len(cache) == 0


def test_a_forgotten_idle_page_cannot_be_evicted_again() -> None:
    cache = PrefixCache()
    cache.insert(b"a", 3)
    cache.mark_idle(3)
    assert cache.idle == 1
    cache.forget(3)
    assert cache.idle == 0
    assert cache.evict() is None


def test_a_digest_has_a_page_in_each_group_and_they_are_evicted_together_by_last_use() -> None:
    cache = PrefixCache(2)
    assert cache.insert(b"a", 3, group=0)
    assert cache.insert(b"a", 4, group=1)
    assert not cache.insert(b"b", 4, group=0)
    assert (cache.find(b"a", 0), cache.find(b"a", 1), cache.find(b"b", 1)) == (3, 4, None)
    cache.mark_idle(4)
    cache.mark_idle(3)
    assert cache.evict() == 4
    assert (cache.find(b"a", 0), cache.find(b"a", 1)) == (3, None)
