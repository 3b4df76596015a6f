"""Faults of whole jobs over GlusterFS: those that any file system has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.job_faults import (  # noqa: F401 - they are to run here
    Site,
    pytest_generate_tests,
    test_a_cancelled_job_is_staged_out,
    test_a_job_at_its_time_limit_is_staged_out,
    test_a_job_that_is_requeued_is_staged_out_and_begins_again,
    test_a_leader_that_hears_none_of_the_others_drains_itself_and_nobody_else,
    test_a_node_cut_off_before_the_epilog_keeps_all_data,
    test_a_node_cut_off_while_the_file_system_comes_up_is_named_and_left_clean,
    test_a_node_whose_device_is_unusable_is_drained_with_the_reason_and_no_other,
    test_a_prolog_killed_in_any_phase_is_cleaned_up_after,
    test_a_server_killed_during_the_job_loses_nothing,
    test_a_server_that_dies_while_data_is_staged_out_proves_nothing,
    test_a_server_that_hangs_while_the_file_system_comes_up_drains_its_node_alone,
    test_a_whole_device_keeps_what_is_owed_over_a_reboot_and_is_empty_afterwards,
    test_an_epilog_killed_in_any_phase_loses_nothing,
    test_cancelling_during_stage_in_ends_it_and_leaves_clean_nodes,
    test_kept_data_survives_a_reboot_and_can_be_discarded,
    test_stage_out_that_cannot_be_proved_keeps_the_data_until_recover,
)
from tests.integration.site_config import CONFIG
from tests.integration.test_main_job import ready  # noqa: F401 - before and after each test

if TYPE_CHECKING:
    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

KILLS = {
    "prolog": [
        ("n2", "preparing", "after"),
        ("n2", "starting", "before"),
        ("n2", "mounting", "before"),
        ("n2", "ready", "before"),
        ("n2", "ready", "after"),
        ("n1", "mounting", "after"),
        ("n2", "mounting", "within"),
    ],
    "epilog": [
        ("n2", "staging-out", "after"),
        ("n1", "staging-out", "after"),
        ("n2", "unmounting", "after"),
        ("n2", "wiping", "after"),
        ("n1", "unmounting", "before"),
    ],
}


@pytest.fixture
def site(cluster: Cluster) -> Site:
    """Jobs have GlusterFS, as it is where a site says nothing of it."""

    def configure(kind: str, storage: str = "") -> None:
        cluster.write_config(CONFIG.format(kind=kind, more=storage))

    return Site(cluster, "--beeond=backend=glusterfs", "glusterfsd", "glusterfs brick", configure)
