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
    assert "Host key verification failed." in answers[2].output


def test_host_files_of_mpi_are_read_too() -> None:
    text = "# nodes\nn2 slots=4\nn1:8\n\nn10\nn2\n"
    assert read_nodefile(text, "hosts") == ("n1", "n2", "n10")


@pytest.mark.parametrize("text", ["", "# none\n", "n1\n$(reboot)\n", "-oProxyCommand=x\n", "n[1-3]\n"])
def test_a_host_file_without_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="hosts"):
        read_nodefile(text, "hosts")
