from __future__ import annotations

import json
import os
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beeond_ctl.errors import RequestError, one_line
from beeond_ctl.request import (
    FLAGS,
    MAX_ENCODED,
    JobNames,
    Request,
    Transfer,
    decode,
    encode,
    expand,
    expand_all,
    needs_scheduler,
    parse_options,
    split_escaped,
)

# Any bytes that can stand in an argument or a file name, as Python sees them.
any_text = st.binary(max_size=40).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
names = any_text.map(lambda text: text.replace("%", "%%").replace("/", "")).filter(
    lambda t: t not in ("", ".", "..") and t[0] not in "~$"
)
relative = st.lists(names, min_size=1, max_size=3).map("/".join)
absolute = relative.map(lambda text: "/" + text)
flags = st.lists(st.sampled_from(sorted(FLAGS)), unique=True).map(lambda chosen: tuple(sorted(chosen)))
requests = st.builds(
    Request,
    backend=st.none() | st.sampled_from(["beegfs", "glusterfs", "local"]),
    meta=st.none() | st.just("all") | st.integers(1, 999),
    storage=st.none() | st.just("all") | st.integers(1, 999),
    stripe_count=st.none() | st.integers(1, 999),
    stripe_dirs=st.none() | st.sampled_from(["8", "1+8+32"]),
    chunk_size=st.none() | st.integers(16, 31).map(lambda power: 2**power),
    capacity=st.none() | st.integers(2**20, 2**60),
    mirror=st.none() | st.booleans(),
    prefer_local=st.none() | st.booleans(),
    interfaces=st.none() | st.sampled_from(["ib0", "ib0+eth1.8"]),
    mount=st.none() | names.map(lambda text: "/" + text.rstrip("/")),
    share=st.none() | st.sampled_from(["0", "1+2"]),
    stage_in=st.lists(st.builds(Transfer, absolute, relative, flags), max_size=3).map(tuple),
    stage_out=st.lists(st.builds(Transfer, relative, absolute, flags), max_size=3).map(tuple),
)


@given(requests)
def test_a_request_survives_its_journey_through_the_environment(request_: Request) -> None:
    text = encode(request_)
    assert text.isascii()
    assert text.isprintable()
    assert decode(text) == request_


def test_who_joins_asks_for_nothing_else() -> None:
    assert decode(encode(parse_options([("beeond", "join=0")]))) == Request(join=0)
    for others in ([("beeond", "mirror=no")], [("beeond-stage-out", "x:/y")]):
        with pytest.raises(RequestError, match="join=0 stands alone: component 0"):
            parse_options([("beeond", "join=0"), *others])


@given(any_text)
def test_whatever_arrives_on_a_node_is_a_request_or_refused(text: str) -> None:
    with suppress(RequestError):
        assert decode(encode(decode(text))) == decode(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | any_text,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["stage_in", "stage_out", "backend", "meta", "mount", "x"]), json_values)
)
def test_no_well_formed_json_gets_past_the_grammar(data: dict[str, object]) -> None:
    try:
        found = decode(json.dumps({"v": 1, **data}))
    except RequestError:
        return
    for transfer in (*found.stage_in, *found.stage_out):
        assert ".." not in transfer.source.split("/") or transfer.source.startswith("/")
    assert all(t.source.startswith("/") and not t.destination.startswith("/") for t in found.stage_in)
    assert all(t.destination.startswith("/") and not t.source.startswith("/") for t in found.stage_out)


def refusal(option: str, text: str) -> str | None:
    try:
        parse_options([(option, text)])
    except RequestError as error:
        return str(error)
    return None


@given(any_text, st.sampled_from(["beeond", "beeond-stage-in", "beeond-stage-out"]))
def test_any_option_text_is_parsed_or_refused_on_one_printable_line(text: str, option: str) -> None:
    message = refusal(option, text)
    if message is not None:
        assert f"--{option}" in message
        assert message.isprintable()


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("beeond", "stripes=4", ["--beeond", "'stripes'", "stripe-count"]),
        ("beeond", "stripe-count=four", ["stripe-count", "'four'", "number"]),
        ("beeond", "stripe-count", ["stripe-count=N"]),
        ("beeond", "chunk-size=100k", ["'100k'", "power of two"]),
        ("beeond", "chunk-size=4GiB", ["'4GiB'", "to 2GiB"]),
        ("beeond", "capacity=lots", ["'lots'", "2TiB"]),
        ("beeond", "capacity=10", ["'10'", "1MiB"]),
        ("beeond-stage-out", "out:/global/out,update", ["',update'", "':update'"]),
        ("beeond", "mirror=maybe", ["'maybe'", "yes or no"]),
        ("beeond", "mount=work", ["'work'", "absolute"]),
        ("beeond", "mount=/a/../b", ["absolute path without '..'"]),
        ("beeond-stage-in", "/data", ["--beeond-stage-in", "SRC:DST"]),
        ("beeond-stage-in", "data:in", ["'data'", "absolute"]),
        ("beeond-stage-out", "$HOME/out:/data", ["'$HOME'", "relative to it"]),
        ("beeond-stage-out", "~/out:/data", ["'~'", "no shell"]),
        ("beeond-stage-out", "out:/data/$USER/r", ["'$USER'", "no shell"]),
        ("beeond-stage-in", "/data:/in", ["'/in'", "relative to $BEEOND"]),
        ("beeond-stage-in", "/data:in/../../etc", ["climbs out", "'..'"]),
        ("beeond-stage-in", "/data:", ["write '.'"]),
        ("beeond-stage-in", "/data:in:fast", ["'fast'", "update"]),
        ("beeond-stage-in", "/data/%q:in", ["'%q'", "%j"]),
        ("beeond-stage-in", "/data%:in", ["'%'"]),
        ("beeond-stage-out", "../x:/data", ["--beeond-stage-out", "climbs out"]),
        ("beeond-stage-out", "out:data", ["'data'", "absolute"]),
        ("beeond-stage-oot", "a:b", ["no such option"]),
    ],
)
def test_a_mistake_is_refused_with_option_value_and_what_would_be_right(
    option: str, value: str, words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        parse_options([(option, value)])
    for word in words:
        assert word in str(caught.value)


def test_repeated_stage_options_all_count_and_a_repeated_key_keeps_its_last_value() -> None:
    made = parse_options(
        [
            ("beeond", "capacity=1g"),
            ("beeond-stage-in", "/a:b"),
            ("beeond-stage-in", "/c:d"),
            ("beeond", "capacity=2g"),
        ]
    )
    assert made == Request(capacity=2 * 2**30, stage_in=(Transfer("/a", "b"), Transfer("/c", "d")))


def test_colons_commas_and_backslashes_can_be_escaped() -> None:
    assert split_escaped(r"a\:b\\:c\,d", ":") == ["a:b\\", "c,d"]
    made = parse_options([("beeond-stage-in", r"/a\:b\\c:d")])
    assert made.stage_in == (Transfer("/a:b\\c", "d"),)


def test_a_stage_option_alone_asks_for_a_file_system() -> None:
    for source in ("out", "$BEEOND/out", "${BEEOND}//out"):  # scripts say it so, and mean the same
        assert parse_options([("beeond-stage-out", f"{source}:/g")]) == Request(
            stage_out=(Transfer("out", "/g"),)
        )
    assert parse_options([("beeond-stage-in", "/g:$BEEOND")]).stage_in == (Transfer("/g", "."),)


def test_patterns_expand_as_slurm_does() -> None:
    known = JobNames(7, "alice", "run", array_job_id=5, array_task_id=2)
    made = expand(Transfer("out", "/g/%u/%x/%j-%A_%a/100%%"), known, inward=False)
    assert made.destination == "/g/alice/run/7-5_2/100%"
    assert (
        expand(Transfer("out", "/%A_%a"), JobNames(7, "a", ""), inward=False).destination == "/7_4294967294"
    )


@pytest.mark.parametrize("name", ["../../etc", "..", "a/b", "/"])
def test_a_job_name_cannot_lead_a_path_elsewhere(name: str) -> None:
    with pytest.raises(RequestError, match="%x"):
        expand(Transfer("%x", "/g"), JobNames(7, "alice", name), inward=False)


@pytest.mark.parametrize("name", ["a/b", "..", "n" * 256])
def test_a_job_name_that_stands_in_no_path_may_be_any(name: str) -> None:
    known = JobNames(7, "alice", name)
    assert expand(Transfer("out", "/%%x"), known, inward=False).destination == "/%x"


@pytest.mark.parametrize(
    ("source", "destination", "job_name", "mount", "words"),
    [
        ("out", "/g/%x", "n" * 256, "", "%x stands for 'nnn"),
        ("out", "/g/%x-%x", "n" * 128, "", "more than 255 bytes"),
        ("out", "/g/%x-", "é" * 127 + "n", "", "more than 255 bytes"),  # 255 bytes, 128 characters
        ("%x-", "/g", "é" * 127 + "n", "", "more than 255 bytes"),
        ("out", "/g" + "/%x" * 21, "n" * 200, "", "more than 4095 bytes"),
        ("out", "/g/" + "%x" * 30_000, "n" * 255, "", "more than 4095 bytes"),
        ("d/" * 2000, "/g", "x", "/mnt/" + "m" * 91, "more than 4095 bytes"),  # below $BEEOND
    ],
)
def test_what_becomes_too_long_for_any_file_system_is_refused(
    source: str, destination: str, job_name: str, mount: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        expand(Transfer(source, destination), JobNames(7, "a", job_name), inward=False, mount=mount)
    assert words in str(caught.value)
    assert "--beeond-stage-out" in str(caught.value)
    assert len(one_line(caught.value)) < 2000


def test_the_longest_that_a_file_system_can_have_is_taken() -> None:
    known = JobNames(7, "alice", "é" * 127 + "n")
    transfer = Transfer("d/" * 1999 + "e", "/g/%x" + "/%x" * 14)
    made = expand(transfer, known, inward=False, mount="/mnt/" + "m" * 90)
    assert len(os.fsencode(made.destination)) == 2 + 15 * 256
    assert len(made.source) + 1 + 95 == 4095


def test_what_patterns_make_one_place_is_seen() -> None:
    asked = Request(stage_out=(Transfer("a", "/g/%j", ("delete",)), Transfer("b", "/g/7/b")))
    with pytest.raises(RequestError, match="would delete what another transfer copies"):
        expand_all(asked, JobNames(7, "alice"), inward=False)
    assert len(expand_all(asked, JobNames(8, "alice"), inward=False)) == 2


def test_many_deletions_take_no_longer_than_other_transfers() -> None:
    def seconds(flags: str) -> float:
        deep = "/a" * 100
        options = [("beeond-stage-out", f"f{number}:{deep}/{number}{flags}") for number in range(256)]
        began = time.process_time()
        parse_options(options)
        return time.process_time() - began

    usual_s = min(seconds("") for _ in range(3))
    assert min(seconds(":delete") for _ in range(3)) < 4 * usual_s


def test_a_path_whose_job_name_is_no_longer_known_is_not_guessed() -> None:
    with pytest.raises(RequestError, match="%x"):
        expand(Transfer("out", "/g/%x"), JobNames(7, "alice", None), inward=False)


def test_slurm_is_asked_only_for_names_that_a_node_does_not_know() -> None:
    assert not needs_scheduler(Request(stage_in=(Transfer("/%j/%u/%%x", "in"),)))
    assert needs_scheduler(Request(stage_in=(Transfer("/%x", "in"),)))


def test_a_request_that_is_too_long_for_an_environment_is_refused() -> None:
    many = tuple(Transfer("/" + "x" * 200, f"d{i}") for i in range(MAX_ENCODED // 200))
    with pytest.raises(RequestError, match="name directories"):
        encode(Request(stage_in=many))


@pytest.mark.parametrize("text", [r'{"v":1,"mount":"/\ud800"}', r'{"v":1,"stage_in":[["/\udc41","in",[]]]}'])
def test_a_request_with_text_that_no_bytes_make_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="malformed"):
        decode(text)
