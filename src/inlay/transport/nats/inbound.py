"""A transfer at its receiver."""

from inlay.prompt import Buffer
from inlay.transport.nats.embeds_cache import EmbedsCache
from inlay.transport.nats.notices import PART_BYTES, Credit, Offer, Place, places


class Inbound:
    """A transfer from another participant.

    Attributes:
        missing: bytes that are to come.
        size: bytes of memory it takes: what is to come, a header that has, and what each part takes
            to be kept apart.
        present: the parts that are there, by number; the header may be one.
        places: of the chunks to come, once memory is kept for them.
        parts: memory for what is to come, once it is granted.
    """

    def __init__(self, sender: str, offer: Offer, now: float) -> None:
        self.sender = sender
        self.offer = offer
        self.moved = now
        self.granted = 0
        self.received = 0
        self.places: list[Place] = []
        self.parts: dict[int, memoryview] = {}
        self.look(None)

    def look(self, kept: EmbedsCache | None) -> None:
        """See what is there, and hold it; with None, hold nothing any more."""
        offer = self.offer
        self.present = {0: Buffer(offer.header)} if offer.header else {}
        if kept is not None:
            for named in offer.named:
                found = kept.find(named.name, offer.sizes[named.part])
                if found is not None:
                    self.present[named.part] = found
        self.missing = sum(
            size for part, size in enumerate(offer.sizes) if part not in self.present
        )
        self.size = len(offer.header) + self.missing + PART_BYTES * len(offer.sizes)

    def plan(self) -> None:
        """Say where the chunks to come belong: from now on what is there is that."""
        self.places = places(self.offer.sizes, self.offer.chunk, self.present)

    @property
    def key(self) -> tuple[str, int]:
        """What it is found by."""
        return self.sender, self.offer.transfer

    @property
    def credit(self) -> Credit:
        """How much may come."""
        return Credit(
            self.offer.transfer, self.granted, tuple(self.present) if self.granted else ()
        )

    def ahead(self) -> int:
        """Bytes granted and not received."""
        return sum(stop - start for _, start, stop in self.places[self.received : self.granted])

    def buffers(self) -> list[Buffer]:
        """All parts, once all are there."""
        return [
            self.present[part]
            if part in self.present
            else Buffer(self.parts.get(part, memoryview(b"")))
            for part in range(len(self.offer.sizes))
        ]
