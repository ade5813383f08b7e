"""The nixl link between two real processes."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.requirements import require

require("nixl", "nixl_cu12", "nixl_cu13")

from tests.transfer.links.running import Prefiller, collect, greet, introduced, reader  # noqa: E402
from tests.transfer.links.worlds import ENGINE_LAYOUTS, KEY, Pages, filled, shuffled_runs, slots_of  # noqa: E402

from outrider.errors import ConfigError, TransferError  # noqa: E402
from outrider.kv.intervals import Interval  # noqa: E402
from outrider.transfer.link import Failed, GroupRead, Landed, Quiet, Received  # noqa: E402
from outrider.transfer.links import control, nixl_agent  # noqa: E402
from outrider.transfer.links import nixl as nixl_link  # noqa: E402
from outrider.transfer.links.control import Answer, Complaints, ControlPlane, Question  # noqa: E402
from outrider.transfer.links.nixl import NixlLink  # noqa: E402
from outrider.transfer.links.reads import PeerReads  # noqa: E402
from outrider.transfer.messages import Hello, Refused, Release  # noqa: E402
from outrider.transfer.tickets import ClusterKey  # noqa: E402

SMALL = ENGINE_LAYOUTS["small"]
LARGE = ENGINE_LAYOUTS["large"]
EVERYTHING = Interval(0, LARGE.num_tokens)


@pytest.fixture(scope="module")
def prefiller() -> Iterator[Prefiller]:
    """Serves the small layout with pages of 16 tokens; tests leave it as it is."""
    with Prefiller() as worker:
        yield worker


def read_and_compare(
    link: NixlLink, endpoint: str, source: Pages, destination: Pages, interval: Interval, seed: int = 1
) -> None:
    """Read all groups, and compare every slot with the known source."""
    runs = shuffled_runs(source, destination, interval, seed)
    groups = range(len(source.memory.groups))
    transfers = {link.read(endpoint, GroupRead(group, group, runs)) for group in groups}
    assert set(collect(link, len(transfers))) == {Landed(transfer) for transfer in transfers}
    for group in groups:
        for page, offset, to_page, to_offset in slots_of(runs):
            here = destination.slot(group, to_page, to_offset)
            assert (here == source.slot(group, page, offset)).all(), (group, page, offset)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
def test_slots_arrive_whatever_the_page_sizes(prefiller: Prefiller, transport: str, page_tokens: int) -> None:
    source = filled(SMALL, page_tokens=16, seed=1)
    destination = Pages(SMALL, page_tokens, 0)
    with reader(destination, transport=transport) as link:
        greet(link, prefiller.endpoint)
        assert link.transport == f"nixl ({transport} from {prefiller.endpoint})"
        for number, interval in enumerate((Interval(0, 2048), Interval(5, 1999), Interval(33, 34))):
            read_and_compare(link, prefiller.endpoint, source, destination, interval, number)


@pytest.mark.parametrize("page_tokens", [8, 32])
def test_slots_arrive_from_other_page_sizes(page_tokens: int) -> None:
    source = filled(SMALL, page_tokens=page_tokens, seed=2)
    destination = Pages(SMALL, 16, 0)
    with Prefiller(page_tokens=page_tokens, seed=2) as worker, reader(destination) as link:
        greet(link, worker.endpoint)
        read_and_compare(link, worker.endpoint, source, destination, Interval(3, 2047))


def test_bytes_beside_the_slots_stay_as_they_are(prefiller: Prefiller) -> None:
    destination = filled(SMALL, page_tokens=8, seed=9, gap_bytes=24)
    expected = filled(SMALL, page_tokens=8, seed=9, gap_bytes=24)
    source = filled(SMALL, page_tokens=16, seed=1)
    runs = shuffled_runs(source, destination, Interval(100, 200), 4)
    with reader(destination) as link:
        greet(link, prefiller.endpoint)
        link.read(prefiller.endpoint, GroupRead(0, 0, runs))
        assert len(collect(link, 1)) == 1
    shape = expected.memory.groups[0]
    for page, offset, to_page, to_offset in slots_of(runs):
        row = expected.arenas[0][to_page][: shape.planes * shape.plane_bytes]
        row.reshape(shape.planes, 8, shape.plane_slot_bytes)[:, to_offset] = source.slot(0, page, offset)
    for found, wanted in zip(destination.arenas, expected.arenas, strict=True):
        assert (found == wanted).all()


def test_a_read_of_nothing_lands(prefiller: Prefiller) -> None:
    with reader(Pages(SMALL, 16, 0)) as link:
        greet(link, prefiller.endpoint)
        transfer = link.read(prefiller.endpoint, GroupRead(0, 0, ()))
        assert collect(link, 1) == [Landed(transfer)]


def test_without_permission_for_its_memory_a_peer_is_read_over_tcp(
    prefiller: Prefiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_link, "can_read_memory", lambda _: False)
    source, destination = filled(SMALL, page_tokens=16, seed=1), Pages(SMALL, 16, 0)
    with reader(destination) as link:
        greet(link, prefiller.endpoint)
        assert link.transport == f"nixl (tcp from {prefiller.endpoint})"
        read_and_compare(link, prefiller.endpoint, source, destination, Interval(0, 100))
    with reader(destination, transport="cma") as link:
        introduction = introduced(link, prefiller.endpoint)
        with pytest.raises(TransferError, match="kv_transport"):
            link.meet(prefiller.endpoint, introduction)


def test_bad_introductions_and_reads_are_refused(prefiller: Prefiller) -> None:
    destination = Pages(SMALL, 16, 0)
    source = Pages(SMALL, 16, 0)
    runs = shuffled_runs(source, destination, Interval(0, 16), 1)
    with reader(destination) as link:
        for introduction in (b"", b"\xc1", os.urandom(100)):
            with pytest.raises(TransferError):
                link.meet(prefiller.endpoint, introduction)
        with pytest.raises(TransferError, match="kv_role"):
            link.meet(link.endpoint, link.introduction())
        greet(link, prefiller.endpoint)
        outside = (runs[0]._replace(source_page=1 << 20),)
        cases = (
            ("127.0.0.1:9", GroupRead(0, 0, runs)),
            (prefiller.endpoint, GroupRead(0, 7, runs)),
            (prefiller.endpoint, GroupRead(0, 1, runs)),
            (prefiller.endpoint, GroupRead(0, 0, outside)),
        )
        for peer, wanted in cases:
            transfer = link.read(peer, wanted)
            (event,) = collect(link, 1)
            assert isinstance(event, Failed)
            assert event.transfer == transfer
        transfer = link.read(prefiller.endpoint, GroupRead(0, 0, runs))
        assert collect(link, 1) == [Landed(transfer)]


def test_damaged_metadata_fails_reads_and_nothing_else(prefiller: Prefiller, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = filled(SMALL, page_tokens=16, seed=1), Pages(SMALL, 16, 0)
    with reader(destination) as link:
        introduction = introduced(link, prefiller.endpoint)
        start = introduction.index(b"nixlSerDes")
        link.meet("127.0.0.1:9", introduction[:start] + os.urandom(40) + introduction[start + 40 :])
        transfer = link.read("127.0.0.1:9", GroupRead(0, 0, shuffled_runs(source, destination, Interval(0, 16), 1)))
        (event,) = collect(link, 1)
        assert isinstance(event, Failed)
        assert event.transfer == transfer
        link.meet(prefiller.endpoint, introduction)
        read_and_compare(link, prefiller.endpoint, source, destination, Interval(0, 100))


def test_another_digest_is_refused(prefiller: Prefiller) -> None:
    with reader(Pages(SMALL, 16, 0)) as link:
        link.send(prefiller.endpoint, Hello(digest=b"another layout", reader="decode"))
        (event,) = collect(link, 1)
        assert isinstance(event, Received)
        assert isinstance(event.message, Refused)


def test_another_cluster_gets_no_answer(prefiller: Prefiller) -> None:
    with reader(Pages(SMALL, 16, 0), key="the key of another cluster") as link:
        link.send(prefiller.endpoint, Hello(digest=b"", reader="decode"))
        assert collect(link, 1, limit_s=0.5) == []


# --- peers that die or stop ---------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_reads_from_a_killed_peer_fail_soon(transport: str) -> None:
    destination = Pages(LARGE, 16, 0)
    runs = shuffled_runs(Pages(LARGE, 8, 0), destination, EVERYTHING, 1)
    with Prefiller(layout="large", page_tokens=8) as worker, reader(destination, transport=transport) as link:
        greet(link, worker.endpoint)
        started = {link.read(worker.endpoint, GroupRead(0, 0, runs)) for _ in range(2)}
        time.sleep(0.1)
        worker.kill()
        killed_s = time.monotonic()
        events = collect(link, 2)
        assert {event.transfer for event in events if isinstance(event, Failed)} == started
        assert time.monotonic() - killed_s < 1.0
        # A later read tries to connect again, and fails as well.
        transfer = link.read(worker.endpoint, GroupRead(0, 0, runs))
        (event,) = collect(link, 1)
        assert isinstance(event, Failed)
        assert event.transfer == transfer
        link.fence(worker.endpoint)
        assert collect(link, 1) == [Quiet(worker.endpoint)]


def test_a_stopped_peer_is_read_over_cma() -> None:
    source, destination = filled(SMALL, page_tokens=16, seed=1), Pages(SMALL, 16, 0)
    with Prefiller() as worker, reader(destination, transport="cma") as link:
        greet(link, worker.endpoint)
        read_and_compare(link, worker.endpoint, source, destination, Interval(0, 16))
        worker.stop()
        read_and_compare(link, worker.endpoint, source, destination, Interval(0, 2048))


def stopped_read(link: NixlLink, worker: Prefiller, destination: Pages) -> int:
    """Start a read over tcp and stop the peer in the middle of it; returns the number of the transfer."""
    greet(link, worker.endpoint)
    runs = shuffled_runs(Pages(LARGE, 16, 0), destination, EVERYTHING, 1)
    transfer = link.read(worker.endpoint, GroupRead(0, 0, runs))
    end_s = time.monotonic() + 5
    while not destination.arenas[0][::64].any() and time.monotonic() < end_s:
        time.sleep(0.001)
    worker.stop()
    assert destination.arenas[0][::64].any(), "the read did not start"
    assert collect(link, 1, limit_s=0.3) == [], "the read ended before its peer was stopped"
    return transfer


def changed_bytes_after_continuing(worker: Prefiller, destination: Pages) -> int:
    """Reuse the memory of the read, let its peer go on, and count the bytes that change."""
    destination.arenas[0][:] = 0xAB
    worker.signal(signal.SIGCONT)
    time.sleep(1.0)
    return int((destination.arenas[0] != 0xAB).sum())


def test_nothing_lands_after_a_fence() -> None:
    destination = Pages(LARGE, 16, 0)
    with Prefiller(layout="large") as worker, reader(destination, transport="tcp") as link:
        transfer = stopped_read(link, worker, destination)
        started_s = time.monotonic()
        link.fence(worker.endpoint)
        failed, quiet = collect(link, 2)
        assert isinstance(failed, Failed)
        assert (failed.transfer, quiet) == (transfer, Quiet(worker.endpoint))
        assert time.monotonic() - started_s < 1.0
        assert changed_bytes_after_continuing(worker, destination) == 0


def test_a_fenced_peer_is_read_again_once_it_was_met_again(prefiller: Prefiller) -> None:
    source, destination = filled(SMALL, page_tokens=16, seed=1), Pages(SMALL, 16, 0)
    with reader(destination) as link:
        for _ in range(2):
            greet(link, prefiller.endpoint)
            read_and_compare(link, prefiller.endpoint, source, destination, Interval(0, 200))
            link.fence(prefiller.endpoint)
            assert collect(link, 1) == [Quiet(prefiller.endpoint)]


def test_bytes_land_after_a_fence_that_does_not_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why what arrives for reads that were given up is dropped. Fails if the test above could not see late bytes."""
    monkeypatch.setattr(PeerReads, "give_up", lambda _reads: None)
    destination = Pages(LARGE, 16, 0)
    with Prefiller(layout="large") as worker, reader(destination, transport="tcp") as link:
        stopped_read(link, worker, destination)
        link.fence(worker.endpoint)
        assert len(collect(link, 2)) == 2
        assert changed_bytes_after_continuing(worker, destination) > 0


@pytest.mark.parametrize("stops", [True, False])
def test_a_peer_survives_that_reads_from_it_are_given_up(stops: bool) -> None:
    """UCX aborts a process that answers a read on a connection that was closed meanwhile."""
    destination = Pages(LARGE, 16, 0)
    with Prefiller(layout="large") as worker, reader(destination, transport="tcp") as link:
        for _ in range(3):
            stopped_read(link, worker, destination)
            if not stops:
                worker.signal(signal.SIGCONT)
            link.fence(worker.endpoint)
            collect(link, 2)
            assert changed_bytes_after_continuing(worker, destination) == 0
            end_s = time.monotonic() + 5
            while link._retired and time.monotonic() < end_s:
                time.sleep(0.05)
            assert not link._retired
            time.sleep(0.2)
            assert worker.process.poll() is None, "the prefill worker was aborted"
            destination.arenas[0][:] = 0
        greet(link, worker.endpoint)
        runs = shuffled_runs(Pages(LARGE, 16, 0), destination, Interval(0, 16), 1)
        transfer = link.read(worker.endpoint, GroupRead(0, 0, runs))
        assert collect(link, 1) == [Landed(transfer)]


def test_an_agent_that_something_still_holds_is_no_fence(prefiller: Prefiller) -> None:
    """`Quiet` would be a lie while the agent lives."""
    nixl = nixl_agent.load_nixl()
    agent = nixl_agent.Agent(nixl, "held", device="lo", with_cma=False)
    held = agent._agent.agent
    with pytest.raises(TransferError, match="may go on writing"):
        agent.destroy()
    del held


def test_nothing_lands_after_closing() -> None:
    destination = Pages(LARGE, 16, 0)
    with Prefiller(layout="large") as worker:
        with reader(destination, transport="tcp") as link:
            stopped_read(link, worker, destination)
            started_s = time.monotonic()
        assert time.monotonic() - started_s < 1.0
        assert changed_bytes_after_continuing(worker, destination) == 0


def test_a_peer_that_stopped_before_it_was_read_can_be_fenced() -> None:
    destination = Pages(SMALL, 16, 0)
    runs = shuffled_runs(Pages(SMALL, 16, 0), destination, Interval(0, 16), 1)
    with Prefiller() as worker, reader(destination, transport="tcp") as link:
        introduction = introduced(link, worker.endpoint)
        worker.stop()
        link.meet(worker.endpoint, introduction)
        transfer = link.read(worker.endpoint, GroupRead(0, 0, runs))
        assert collect(link, 1, limit_s=0.3) == []
        link.fence(worker.endpoint)
        failed, quiet = collect(link, 2)
        assert isinstance(failed, Failed)
        assert (failed.transfer, quiet) == (transfer, Quiet(worker.endpoint))


def test_other_peers_are_read_while_one_is_stopped_and_fenced(prefiller: Prefiller) -> None:
    source, destination = filled(SMALL, page_tokens=16, seed=1), Pages(SMALL, 16, 0)
    runs = shuffled_runs(source, destination, Interval(0, 16), 1)
    with Prefiller(seed=5) as worker, reader(destination, transport="tcp") as link:
        greet(link, worker.endpoint)
        greet(link, prefiller.endpoint)
        read_and_compare(link, prefiller.endpoint, source, destination, Interval(0, 500))
        worker.stop()
        stuck = link.read(worker.endpoint, GroupRead(0, 0, runs))
        other = link.read(prefiller.endpoint, GroupRead(1, 1, runs))
        assert collect(link, 1) == [Landed(other)]
        link.fence(worker.endpoint)
        assert [event.transfer for event in collect(link, 2) if isinstance(event, Failed)] == [stuck]
        read_and_compare(link, prefiller.endpoint, source, destination, Interval(0, 500))


def test_a_peer_restarted_under_the_same_endpoint_is_read_again() -> None:
    destination = Pages(SMALL, 16, 0)
    with Prefiller(engine="first", seed=1) as first, reader(destination) as link:
        endpoint = first.endpoint
        greet(link, endpoint)
        read_and_compare(link, endpoint, filled(SMALL, page_tokens=16, seed=1), destination, Interval(0, 64))
        first.kill()
        with Prefiller(engine="second", seed=2, port=int(endpoint.rpartition(":")[2])) as second:
            assert second.endpoint == endpoint
            link.forget(endpoint)
            greet(link, endpoint)
            read_and_compare(link, endpoint, filled(SMALL, page_tokens=16, seed=2), destination, Interval(0, 64))


# --- the thread -----------------------------------------------------------------------------------------


def test_an_idle_link_sleeps() -> None:
    with reader(Pages(SMALL, 16, 0)) as link:
        time.sleep(0.1)
        before_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before_s < 0.1
        started_s = time.monotonic()
        link.wait(0.05)
        assert 0.04 < time.monotonic() - started_s < 1.0


def test_calls_do_not_block_while_a_large_read_runs() -> None:
    destination = Pages(LARGE, 16, 0)
    runs = shuffled_runs(Pages(LARGE, 16, 0), destination, EVERYTHING, 1)
    with Prefiller(layout="large") as worker, reader(destination) as link:
        greet(link, worker.endpoint)
        read = link.read(worker.endpoint, GroupRead(0, 0, runs))
        link.send(worker.endpoint, Hello(digest=b"another layout", reader="decode"))
        events = collect(link, 2)
        assert [type(event) for event in events] == [Received, Landed], "a message waited for a read"
        assert events[1] == Landed(read)


def test_a_failing_desk_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class BrokenDesk:
        class leases:  # noqa: N801
            num_claimed = 0

        def answer(self, *_: object) -> None:
            raise ZeroDivisionError("a desk that fails")

    pages = Pages(SMALL, 16, 0)
    broken = NixlLink(
        pages.memory,
        BrokenDesk(),
        ClusterKey(KEY),
        host="127.0.0.1",
        port=0,
        engine="p",  # type: ignore[arg-type]
    )
    try:
        with reader(pages) as link:
            for _ in range(2):
                link.send(broken.endpoint, Release(lease=b"", reader=""))
            end_s = time.monotonic() + 3
            while broken.complaints.get("questions that could not be answered") != 2 and time.monotonic() < end_s:
                time.sleep(0.01)
            assert broken.complaints == {"questions that could not be answered": 2}
            broken.poll()
    finally:
        broken.close()


def test_calls_say_that_the_thread_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    with reader(Pages(SMALL, 16, 0)) as link:

        def die() -> None:
            raise SystemExit("a test")

        monkeypatch.setattr(link, "_turn", die)
        link.send("127.0.0.1:9", Release(lease=b"", reader=""))
        link._thread.join(3)
        for call in (link.poll, lambda: link.fence("127.0.0.1:9"), lambda: link.wait(1.0)):
            with pytest.raises(TransferError, match="has ended"):
                call()


def test_a_closed_link_says_so() -> None:
    with reader(Pages(SMALL, 16, 0)) as link:
        pass
    link.close()
    with pytest.raises(TransferError, match="closed"):
        link.send("127.0.0.1:9", Release(lease=b"", reader=""))


def test_what_was_sent_before_a_link_is_closed_arrives() -> None:
    """A prefill worker holds pages until they are released, or until their lease ends."""
    plane = ControlPlane(ClusterKey(KEY), address="127.0.0.1", port=0, complaints=Complaints())
    received: list[Question | Answer] = []
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            plane.wait(0.01)
            received.extend(plane.receive())

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        for number in range(1, 11):
            with reader(Pages(SMALL, 16, 0)) as link:
                link.send(plane.endpoint, Release(lease=bytes(16), reader="decode"))
            end_s = time.monotonic() + 2.0
            while len(received) < number and time.monotonic() < end_s:
                time.sleep(0.001)
            assert [type(each.message) for each in received] == number * [Release]
    finally:
        over.set()
        listener.join()
        plane.close()


def test_missing_nixl_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl_agent.load_nixl.cache_clear()
    monkeypatch.setattr(nixl_agent, "MODULES", ("nixl_that_is_missing._api",))
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[pd\]'"), reader(Pages(SMALL, 16, 0)):
        pass


def test_nothing_listens_outside_of_loopback(prefiller: Prefiller) -> None:
    inodes = set()
    for entry in os.scandir(f"/proc/{prefiller.process.pid}/fd"):
        name = os.readlink(entry.path)
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    listening = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{prefiller.process.pid}/net/{table}", encoding="ascii") as lines:
            for fields in map(str.split, list(lines)[1:]):
                if fields[3] == "0A" and fields[9] in inodes:
                    listening.add(fields[1].partition(":")[0])
    assert listening == {"0100007F"}


def test_reads_leave_no_threads_and_descriptors_behind(prefiller: Prefiller) -> None:
    destination = Pages(SMALL, 16, 0)

    def use() -> None:
        with reader(destination) as link:
            for _ in range(2):
                greet(link, prefiller.endpoint)
                link.fence(prefiller.endpoint)
                assert collect(link, 1) == [Quiet(prefiller.endpoint)]

    use()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        use()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_connection_that_is_not_used_is_closed_and_made_again(
    prefiller: Prefiller, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "IDLE_S", 0.3)
    monkeypatch.setattr(nixl_link, "IDLE_S", 0.3)
    monkeypatch.setattr(nixl_link, "TIDY_INTERVAL_S", 0.05)
    monkeypatch.setattr(nixl_link, "IDLE_SLEEP_S", 0.05)
    source, destination = filled(SMALL, page_tokens=16, seed=1), Pages(SMALL, 16, 0)

    def opened_since(before: set[str]) -> set[str]:
        """Names of what was opened and is still open; what earlier tests left open may be closed meanwhile."""
        found = set()
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{number}"))
        return found - before

    with reader(destination, transport=transport) as link:
        before = opened_since(set())
        greet(link, prefiller.endpoint)
        for number in range(2):
            read_and_compare(link, prefiller.endpoint, source, destination, Interval(0, 100), number)
            assert opened_since(before)
            end_s = time.monotonic() + 5
            while opened_since(before) and time.monotonic() < end_s:
                time.sleep(0.05)
            assert not opened_since(before)
        link.send(prefiller.endpoint, Hello(digest=b"another", reader="decode"))
        (event,) = collect(link, 1)
        assert isinstance(event, Received)


def test_a_read_that_takes_long_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_link, "IDLE_S", 0.0)
    monkeypatch.setattr(nixl_link, "TIDY_INTERVAL_S", 0.0)
    with Prefiller(layout="large") as worker:
        source, destination = filled(LARGE, page_tokens=16, seed=1), Pages(LARGE, 16, 0)
        runs = shuffled_runs(source, destination, Interval(0, 20000), 1)
        with reader(destination, transport="tcp") as link:
            greet(link, worker.endpoint)
            transfer = link.read(worker.endpoint, GroupRead(0, 0, runs))
            assert collect(link, 1, limit_s=30.0) == [Landed(transfer)]
