"""KV pages out and in: a worker fills its prefix cache from others', and from what it evicted.

A page has a name that nobody else can have, the keyed digest of all that made it. So a transfer is
a cache fill: it changes no output, may stop anywhere, and every failure is a recomputation.

    exchange   on the event loop: brings the pages a request lacks, or lost, and answers peers
    answer     memory of what a peer is given, the peer's own where it has lent some
    fetching   one fetch, from a tier or from a peer
    tiers      what the cache evicts, kept outside of it: in `host_memory`, on `disk`
    tier_events  what routers are told of these
    price      when that is cheaper than computing them
    cached     in the engine's thread, between steps: pages of the prefix cache, read and filled
    copying    the bytes of a page, in a form that depends on no device; records with checksums
"""
