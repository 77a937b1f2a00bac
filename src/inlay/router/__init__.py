"""Choice of a worker for each request, queueing while all are full, and resuming.

`Router` is all that a frontend sees: the models that are served, `send` for requests of one prompt
(they go to one worker together), `embed` for vectors. It knows workers only through
`inlay.transport.api.Plane`.

    router.py           Router                 what a frontend sees
    fleet.py            Fleet, Catalog         the pools, as the workers are now; names to models
    shares.py           shares_of              which weights a name means
    snapshot.py         Pool, Snapshot         workers that can serve each other's requests: arrays
    member.py           PoolMember             one worker of a pool: its load and its cache
    decide.py           decide                 the workers for a request: a function of a `Snapshot`
    terms.py                                   what a choice weighs, in positions to compute
    dispatcher.py       Dispatcher             places requests, and those that wait
    admission_queue.py  AdmissionQueue         whose turn it is
    sending.py          Sender, Booking        sends to the chosen workers; the load until the end
    handover.py                                a prompt computed at one worker, decoded at another
    resume.py           ResumingStream         one request over as many attempts as it needs
    prices.py           RouterPrice            what a fetched position costs, beside a computed one
    index.py            KvIndex                block keys to sets of workers
    peers.py            PeerLoads              loads that frontends of a fleet send each other
                        CacheTracker           KV events of workers, numbered, with snapshots

Invariants:

- A pool is one model, one set of weights, one dtype. Routing and resuming never leave it.
- `decide` reads, and nothing else: no clock, no random number, no callback. The `Dispatcher` alone
  places requests. What ends, joins or leaves only marks that there may be room.
- A choice costs a few operations on arrays, whatever the number of workers. No frontend asks
  another anything while a request waits: each sends four times a second the changes of its load,
  everything every 5 s, and everything at once when a new frontend appears.
- An attempt ends with `OverloadedError` when its worker is gone, refused or gave the request up.
  The next has the output so far as `prior_output` and goes to a worker of the same engine and
  engine version whose card says that the features in use continue exactly, or up to rounding in
  16 bits. Attempts are bounded; invalid requests are not retried; a request without output yet may
  start anew at any worker of the pool.
- A client below its share of a full worker's places goes on to that worker's engine all the same.
"""

from typing import TYPE_CHECKING

from inlay.base.lazy import exported

if TYPE_CHECKING:
    from inlay.router.fleet import ServedModel
    from inlay.router.router import Router

__all__ = ["Router", "ServedModel"]

__getattr__ = exported(__name__, {"Router": "router", "ServedModel": "fleet"})
