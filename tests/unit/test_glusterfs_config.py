"""The text and command lines that the GlusterFS backend makes of a plan."""

from __future__ import annotations

import gc
import time
import tracemalloc

import pytest

from beeond_ctl.backends import Keys, Mount, PortOpen, Service, get
from beeond_ctl.backends import glusterfs as backend
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import ConfigError
from beeond_ctl.plan import Job, Plan, make_plan
from beeond_ctl.request import Request

KEYS = Keys("a-secret")
JOB = Job(42, 1000, 1000, "alice")


def plan(*nodes: str, paths: tuple[str, ...] = ("/nvme/a",), suffix: str = "") -> Plan:
    config = SiteConfig.model_validate({"storage": {"paths": list(paths)}, "network": {"suffix": suffix}})
    return make_plan(config, Request(), JOB, nodes or ("n1", "n2", "n3"), block=21000)


def test_each_target_has_a_brick_with_a_port_of_its_own() -> None:
    bricks = backend.services(plan(paths=("/nvme/a", "/nvme/b"), suffix="-ib"), "n2", KEYS)
    assert [brick.ready for brick in bricks] == [
        PortOpen("n2-ib", 21000),
        PortOpen("n2-ib", 21001),
    ]
    assert 'option directory "/nvme/b/job-42/data"' in bricks[1].files[0].content
    assert 'option transport.socket.bind-address "n2-ib"' in bricks[1].files[0].content


def test_all_nodes_have_the_same_client() -> None:
    made = plan(paths=("/nvme/a", "/nvme/b"))
    mounts = [backend.mount(made, node, KEYS) for node in made.nodes]
    assert mounts[0] == mounts[1] == mounts[2]
    service = mounts[0].service
    assert service
    assert "--volfile-id=beeond-42" in service.argv  # df would show glusterfs:(null)
    text = service.files[0].content
    assert text.count("type protocol/client") == 6
    for node in made.nodes:
        assert text.count(f'option remote-host "{node}"') == 2


def test_nothing_that_runs_forks_or_shows_the_password() -> None:
    made = plan()
    service = backend.mount(made, "n1", KEYS).service
    assert service
    for each in (*backend.services(made, "n1", KEYS), service):
        assert "--no-daemon" in each.argv
        assert KEYS.authentication not in " ".join((*each.argv, *each.env.values(), each.name, each.log))
        assert all(file.mode == 0o600 for file in each.files)


def test_a_brick_whose_device_is_full_goes_on_serving() -> None:
    text = backend.services(plan(), "n1", KEYS)[0].files[0].content
    assert 'option health-check-interval "0"' in text
    assert 'option reserve "0"' in text


def test_another_key_makes_another_client() -> None:
    made = plan()
    assert "other" in backend.client_volume(made, Keys("other"))
    assert "other" not in backend.client_volume(made, KEYS)


@pytest.mark.parametrize(
    ("path", "quoted"),
    [('/a "b" c/x', r'"/a \"b\" c/x/job-42/data"'), ("/back\\slash", r'"/back\\slash/job-42/data"')],
)
def test_odd_paths_are_quoted(path: str, quoted: str) -> None:
    brick = backend.services(plan(paths=(path,)), "n1", KEYS)[0]
    assert f"option directory {quoted}" in brick.files[0].content


@pytest.mark.parametrize("path", ["/nvme/`reboot`", "/nvme/new\nline", "/nvme/\udcff"])
def test_paths_that_a_volume_file_cannot_hold_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="volume file"):
        backend.services(plan(paths=(path,)), "n1", KEYS)


def test_ten_thousand_nodes_take_less_than_a_second_and_200_mib() -> None:
    nodes = [f"node{number:05}" for number in range(10_000)]
    gc.freeze()  # the collector is not to look at what tests before have left
    try:
        assert min(seconds(nodes) for _ in range(3)) < 1
    finally:
        gc.unfreeze()
    tracemalloc.start()
    kept = whole(plan(*nodes))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 << 20, len(kept)


def seconds(nodes: list[str]) -> float:
    began = time.thread_time()
    assert len(whole(plan(*nodes))) == 10_000
    return time.thread_time() - began


def whole(made: Plan) -> list[tuple[tuple[Service, ...], Mount]]:
    return [(backend.services(made, node, KEYS), backend.mount(made, node, KEYS)) for node in made.nodes]


def test_the_local_backend_binds_the_first_target() -> None:
    made = plan("n1", paths=("/nvme/a", "/nvme/b"))
    local = get("local")
    assert local.services(made, "n1", KEYS) == ()
    assert local.mount(made, "n1", KEYS).bind_source == "/nvme/a/job-42/data"
