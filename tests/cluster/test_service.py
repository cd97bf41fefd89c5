"""One service over three hosts: right answers, and what clients get when a host or its cable goes.

In the order of the file: what a test breaks comes back before it ends.
"""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serving.cli.demo_pages import Story
from tests.cluster.asking import Said, ask, at_once, pages
from tests.cluster.cluster import WORKER, Cluster
from tests.cluster.hosts import Host
from tests.cluster.three_hosts import holder, other, well_on_both

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(1200)]

RETRIED_S = 20.0  # for an answer that another worker gives after a node was lost: noticed within 5 s, linked anew
REFUSED_S = 15.0  # for a client to hear that nobody is there
LONG = {"max_tokens": 250, "ignore_eos": True}
STORY = Story.drawn(5)
QUESTION = [*pages(STORY), {"type": "text", "text": STORY.questions[0]}]


def received(host: Host) -> int:
    """Bytes that a host's network card has received."""
    line = host.run("grep", "eth0", "/proc/net/dev", environment={"PATH": "/usr/bin:/bin"}).stdout
    return int(line.split(":")[1].split()[0])


def right(said: Said) -> bool:
    return said.status == 200 and said.finished and said.text == STORY.answers[0]


def test_answers_are_right_with_kv_that_crosses_nodes(cluster: Cluster):
    well_on_both(cluster)
    before = [received(cluster.network.hosts[letter]) for letter in "bc"]
    with ThreadPoolExecutor(8) as pool:
        answers = [one.result() for one in at_once(pool, 16, cluster, QUESTION, mode="exact")]
    assert all(right(one) for one in answers), answers
    crossed = [received(cluster.network.hosts[letter]) - was for letter, was in zip("bc", before, strict=True)]
    print("MiB received by b and c:", [round(one / 2**20, 1) for one in crossed])
    assert min(crossed) > 2**20


def test_a_chunk_that_was_linked_on_one_node_is_found_from_the_other(cluster: Cluster):
    assert right(ask(cluster, QUESTION))
    cluster.settle()
    with ThreadPoolExecutor(12) as pool:
        answers = [one.result() for one in at_once(pool, 24, cluster, QUESTION)]
    assert all(right(one) for one in answers), answers
    assert all(one.orbit["vision_tokens_encoded"] == 0 for one in answers)
    assert all(one.orbit["tokens_reused"] > 0 for one in answers)


def test_the_doctor_finds_every_node_well_and_tells_how_fast_kv_moves(cluster: Cluster):
    arguments = ("doctor", "--cluster", "--config", "/mnt/orbitserve.yaml")
    environment = cluster.environment | {"COLUMNS": "200"}
    found = cluster.head.run("orbitserve", *arguments, environment=environment, seconds=400)
    assert found.returncode == 0, found.stdout
    assert len(re.findall(r"NIXL 10\.77\.0\.\d → 10\.77\.0\.\d +[\d,]+ MiB/s", found.stdout)) == 2, found.stdout
    assert found.stdout.count("versions") == 3


def test_a_workers_node_is_killed_and_what_ran_there_goes_on_elsewhere(cluster: Cluster):
    cluster.settle()  # what was learnt is in the shared tier
    whole = ask(cluster, QUESTION, stream=True, **LONG)
    assert whole.finished, whole
    keeper = holder(cluster, "LibraryKeeper")
    victim = other(keeper)
    with ThreadPoolExecutor(12) as pool:
        begun = [threading.Event() for _ in range(6)]
        streams = [pool.submit(ask, cluster, QUESTION, stream=True, began=one, **LONG) for one in begun]
        assert all(one.wait(120) for one in begun)
        cluster.network.hosts[victim].power_off()
        killed = time.monotonic()
        links = at_once(pool, 4, cluster, QUESTION, mode="exact")
        first = min(links, key=lambda one: one.result().seconds).result()
        ended = [one.result() for one in streams]
    print("recovery_s", round(first.seconds, 1), "links", [round(one.result().seconds, 1) for one in links])
    print("streams ended after", round(time.monotonic() - killed, 1))
    assert all(one.finished and one.text == whole.text for one in ended), ended
    assert all(right(one.result()) for one in links), [one.result() for one in links]
    assert first.seconds < RETRIED_S
    again = ask(cluster, QUESTION)  # by the worker that is left, whoever had linked it
    assert right(again)
    assert again.orbit["vision_tokens_encoded"] == 0
    cluster.join(victim, WORKER)
    well_on_both(cluster)


def test_the_keepers_node_is_killed_and_files_go_on(cluster: Cluster):
    keeper = holder(cluster, "LibraryKeeper")
    cluster.network.hosts[keeper].power_off()
    upload = {"files": {"file": ("page.png", STORY.pictures[0])}, "data": {"purpose": "vision"}}
    sent = httpx.post(f"{cluster.url}/v1/files", timeout=60, trust_env=False, **upload)
    assert sent.status_code == 200, sent.text
    assert right(ask(cluster, QUESTION))
    cluster.wait_until(lambda: holder(cluster, "LibraryKeeper") == other(keeper), 300, "a keeper on the other node")
    began = time.monotonic()
    gone = httpx.delete(f"{cluster.url}/v1/files/{sent.json()['id']}", timeout=120, trust_env=False)
    assert gone.status_code == 200, gone.text
    assert time.monotonic() - began < 60
    cluster.join(keeper, WORKER)
    well_on_both(cluster)


def test_a_cable_that_is_out_for_seven_seconds_costs_no_answer(cluster: Cluster):
    whole = ask(cluster, QUESTION, stream=True, **LONG)
    with ThreadPoolExecutor(8) as pool:
        begun = [threading.Event() for _ in range(4)]
        streams = [pool.submit(ask, cluster, QUESTION, stream=True, began=one, **LONG) for one in begun]
        assert all(one.wait(120) for one in begun)
        cluster.network.hosts["b"].unplug()
        links = at_once(pool, 3, cluster, QUESTION, mode="exact")
        time.sleep(7)
        cluster.network.hosts["b"].plug()
        ended, linked = [one.result() for one in streams], [one.result() for one in links]
    print("streams", [round(one.seconds, 1) for one in ended], "links", [round(one.seconds, 1) for one in linked])
    assert all(one.finished and one.text == whole.text for one in ended), ended
    assert all(right(one) for one in linked), linked
    cluster.wait_until_well()


def test_without_any_worker_clients_are_told_within_seconds(cluster: Cluster):
    """Both workers' cables are out for a minute: Ray gives their nodes up, and these must start anew."""
    with ThreadPoolExecutor(12) as pool:
        begun = [threading.Event() for _ in range(3)]
        long = {"max_tokens": 1500, "ignore_eos": True}
        streams = [pool.submit(ask, cluster, QUESTION, stream=True, began=one, **long) for one in begun]
        assert all(one.wait(120) for one in begun)
        for letter in "bc":
            cluster.network.hosts[letter].unplug()
        out = time.monotonic()
        links = at_once(pool, 2, cluster, QUESTION, mode="exact")
        linked = [one.result() for one in links]
        ended = [one.result() for one in streams]
        print("streams ended after", round(time.monotonic() - out, 1), [one.error for one in ended])
        assert time.monotonic() - out < 2 * REFUSED_S
        later = [ask(cluster, QUESTION, mode="exact", stream=stream) for stream in (False, True)]
        time.sleep(max(0.0, out + 60 - time.monotonic()))
    refused = [*linked, *later]
    print("refused after", [round(one.seconds, 1) for one in refused])
    assert [one.status for one in refused] == [503] * 4, refused
    assert all(one.retry_after for one in refused), refused
    assert all(one.seconds < REFUSED_S for one in refused), refused
    assert all(one.error and not one.finished for one in ended), ended
    for letter in "bc":  # as whatever looks after a node would: a supervisor, or KubeRay
        cluster.network.hosts[letter].power_off()
    for letter in "bc":
        cluster.join(letter, WORKER)
    well_on_both(cluster)
    assert right(ask(cluster, QUESTION))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_whose_only_node_is_killed_is_missed_within_seconds(cluster: Cluster, role: str):
    """The other role stays, on the other node; a node with room for it brings the role back."""
    cluster.network.hosts["b"].power_off()
    cluster.join("b", {name: amount for name, amount in WORKER.items() if name != role})
    b, c = (cluster.network.hosts[letter].address for letter in "bc")
    deployments = {"prefill": "PrefillWorker", "decode": "DecodeWorker"}
    wanted = {name: {c} if one == role else {b, c} for one, name in deployments.items()}
    cluster.wait_until(
        lambda: all(set(cluster.replicas().get(name, ())) == nodes for name, nodes in wanted.items()), 600, f"{wanted}"
    )
    cluster.wait_until(lambda: right(ask(cluster, QUESTION)), 120, "a right answer")
    with ThreadPoolExecutor(4) as pool:
        begun = threading.Event()
        stream = pool.submit(ask, cluster, QUESTION, stream=True, began=begun, **LONG)
        assert begun.wait(120)
        cluster.network.hosts["c"].power_off()
        killed = time.monotonic()
        refused = [one.result() for one in at_once(pool, 2, cluster, QUESTION, mode="exact")]
        if role == "decode":  # no other worker can go on with it
            ended = stream.result()
            assert time.monotonic() - killed < 2 * REFUSED_S
            assert ended.error, ended
            assert not ended.finished
        refused.append(ask(cluster, QUESTION, mode="exact"))
        late = ask(cluster, QUESTION, mode="exact", stream=True)
    print(role, "refused after", [round(one.seconds, 1) for one in [*refused, late]])
    assert [one.status for one in refused] == [503] * 3, refused
    assert all(one.retry_after for one in refused), refused
    assert late.status == 503 or (role == "decode" and late.error), "prefill may have given its first token"
    assert not late.finished
    assert all(one.seconds < REFUSED_S for one in [*refused, late]), [*refused, late]
    cluster.join("c", WORKER)
    cluster.wait_until(lambda: right(ask(cluster, QUESTION)), 600, f"an answer with {role} back")
    cluster.network.hosts["b"].power_off()
    cluster.join("b", WORKER)
    well_on_both(cluster)
