"""A prefill worker without an engine: serves pages full of known bytes until its standard input ends.

Prints its endpoint once it can be reached. Run by the tests as a process of its own, which they kill and stop.
"""

import json
import sys
import time

from tests.transfer.links.worlds import DIGEST, ENGINE_LAYOUTS, filled

from outrider.transfer.desk import Desk
from outrider.transfer.leases import LeaseBook
from outrider.transfer.links.nixl import NixlLink
from outrider.transfer.offers import BINDING_BYTES, GroupSignature, Offer
from outrider.transfer.tickets import ClusterKey


def main() -> None:
    given = json.loads(sys.argv[1])
    pages = filled(ENGINE_LAYOUTS[given["layout"]], page_tokens=given["page_tokens"], seed=given["seed"])
    signature = GroupSignature("full", "full", 1, 0, "target", "test")
    book = LeaseBook(600.0)
    offer = Offer(engine=given["engine"], binding=bytes(BINDING_BYTES), num_tokens=1, first_token=1, groups={})
    # Some lease is always claimed, so that the link expects reads at any time.
    book.claim(book.grant("request", offer, 0.0), "decode", time.monotonic())
    desk = Desk(engine=given["engine"], digest=DIGEST, signatures=[signature], leases=book, clock=time.monotonic)
    link = NixlLink(
        pages.memory, desk, ClusterKey(given["key"]), host="127.0.0.1", port=given["port"], engine=given["engine"]
    )
    print(json.dumps({"endpoint": link.endpoint}), flush=True)
    sys.stdin.read()
    link.close()


if __name__ == "__main__":
    main()
