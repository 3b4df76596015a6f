"""Launchers: what a node said is told of that node, with its cause."""

from __future__ import annotations

import pytest

from beeond_ctl.errors import UsageError
from beeond_ctl.launch import Answer, _read_pdsh, fold, on_nodes
from beeond_ctl.lifecycle.manual import read_nodefile


def test_a_word_that_a_shell_would_read_as_more_is_refused() -> None:
    for word in ("a b", "$(reboot)", "x;y", "`", "", "a\nb"):
        with pytest.raises(UsageError):
            on_nodes(["n1"], ["beeond-ctl", word], timeout_s=1)
    with pytest.raises(UsageError):
        on_nodes(["n1;reboot"], ["beeond-ctl"], timeout_s=1)


def test_nodes_that_say_the_same_are_told_together() -> None:
    answers = [
        Answer("n1", 0, ""),
        Answer("n2", 1, "beeond-ctl: no space\n"),
        Answer("n3", 0, "\n"),
        Answer("n4", 1, "no space"),
        Answer("n5", None, ""),
    ]
    assert fold(answers) == [
        (["n1", "n3"], "done"),
        (["n2", "n4"], "no space"),
        (["n5"], "no answer; is the node up?"),
    ]


def test_what_pdsh_prints_is_told_of_the_node_that_said_it() -> None:
    stdout = "n1: fine\nn1: beeond-ctl-exit=0\nn2: beeond-ctl: bad\nn2: beeond-ctl-exit=1\n"
    stderr = "n3: Host key verification failed.\npdsh@head: n3: ssh exited with exit code 255\n"
    answers = _read_pdsh(["n1", "n2", "n3"], stdout, stderr)
    assert [(answer.node, answer.code) for answer in answers] == [("n1", 0), ("n2", 1), ("n3", None)]
    assert answers[2].output.startswith("host key is not known; ")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("No ED25519 host key is known for n1 and you have requested strict checking.\r\nHost key verification failed.",
         "host key is not known; "),
        ("@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r\nHost key verification failed.",
         "host key is not the known one; "),
        ("root@n1: Permission denied (publickey).", "login of root by key was refused; "),
        ("ssh: connect to host n1 port 22: No route to host", "cannot be reached: No route to host"),
        ("ssh: connect to host n1 port 22: Connection timed out", "cannot be reached: no answer within"),
        ("Connection timed out during banner exchange", "cannot be reached: no answer within"),
        ("Timeout, server n1 not responding.", "lost while it worked: "),
        ("Read from remote host n1: Connection timed out\r\nclient_loop: send disconnect: Broken pipe",
         "lost while it worked: "),
        ("Connection to n1 closed by remote host.", "lost while it worked: "),
        ("ssh: Could not resolve hostname n1: Name or service not known",
         "cannot be reached: Name or service not known"),
    ],
)  # fmt: skip
def test_why_a_node_is_not_reached_is_told_in_words_that_fold(said: str, told: str) -> None:
    stderr = "".join(
        f"n1: {line}\n" for line in [*said.split("\n"), "pdsh@head: n1: ssh exited with exit code 255"]
    )
    (answer,) = _read_pdsh(["n1"], "", stderr)
    assert answer.code is None
    assert answer.output.startswith(told)
    assert "n1" not in answer.output


def test_what_a_command_says_is_told_as_it_is() -> None:
    stdout = "n1: ssh: connect to host n2 port 22: No route to host\nn1: beeond-ctl-exit=1\n"
    (answer,) = _read_pdsh(["n1"], stdout, "")
    assert answer == Answer("n1", 1, "ssh: connect to host n2 port 22: No route to host")


def test_host_files_of_mpi_are_read_too() -> None:
    text = "# nodes\nn2 slots=4\nn1:8\n\nn10\nn2\n"
    assert read_nodefile(text, "hosts") == ("n1", "n2", "n10")


@pytest.mark.parametrize("text", ["", "# none\n", "n1\n$(reboot)\n", "-oProxyCommand=x\n", "n[1-3]\n"])
def test_a_host_file_without_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="hosts"):
        read_nodefile(text, "hosts")
