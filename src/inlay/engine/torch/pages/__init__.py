"""KV pages out and in: a worker fills its prefix cache from another's.

A page has a name that nobody else can have, the keyed digest of all that made it. So a transfer is
a cache fill: it changes no output, may stop anywhere, and every failure is a recomputation.

    exchange   on the event loop: asks a peer for the pages a request lacks, and answers peers
    price      when that is cheaper than computing them
    cached     in the engine's thread, between steps: pages of the prefix cache, read and filled
    copying    the bytes of a page, in a form that depends on no device; records with checksums
"""
