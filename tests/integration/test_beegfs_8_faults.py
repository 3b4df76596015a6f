"""Faults of whole jobs over the stand-ins for BeeGFS 8: those in which it may differ from 7.4."""

from __future__ import annotations

import pytest

from tests.integration import test_sweep
from tests.integration.job_faults import (  # noqa: F401 - they are to run here
    pytest_generate_tests,
    test_a_job_at_its_time_limit_is_staged_out,
    test_a_job_cancelled_while_its_file_system_comes_up_leaves_nothing,
    test_a_job_that_is_requeued_is_staged_out_and_begins_again,
    test_a_leader_that_hears_none_of_the_others_drains_itself_and_nobody_else,
    test_a_node_cut_off_before_the_epilog_keeps_all_data,
    test_a_node_cut_off_while_the_file_system_comes_up_is_named_and_left_clean,
    test_a_node_whose_device_is_unusable_is_drained_with_the_reason_and_no_other,
    test_a_prolog_killed_in_any_phase_is_cleaned_up_after,
    test_a_server_killed_during_the_job_loses_nothing,
    test_a_server_that_dies_while_data_is_staged_out_proves_nothing,
    test_a_whole_device_keeps_what_is_owed_over_a_reboot_and_is_empty_afterwards,
    test_an_epilog_killed_in_any_phase_loses_nothing,
    test_cancelling_during_stage_in_ends_it_and_leaves_clean_nodes,
    test_kept_data_survives_a_reboot_and_can_be_discarded,
    test_stage_out_that_cannot_be_proved_keeps_the_data_until_recover,
)
from tests.integration.test_beegfs_faults import (  # noqa: F401 - they are to run here
    furnished,
    site,
    test_a_file_system_that_cannot_be_laid_out_is_the_fault_of_who_has_the_server_that_hangs,
    test_a_management_that_died_or_hangs_in_the_job_loses_nothing_and_holds_up_nothing_for_ever,
    test_clients_can_be_unmounted_though_the_management_has_died,
)
from tests.integration.test_sweep import (  # noqa: F401 - they are to run here
    test_an_instance_that_lost_its_state_is_found_by_place_and_token,
)

pytestmark = [pytest.mark.cluster, pytest.mark.long]

EDITION = "8"
KILLS = {
    "prolog": [
        ("n2", "mounting", "before"),
        ("n2", "ready", "after"),
    ],
    "epilog": [
        ("n2", "unmounting", "after"),
        ("n2", "wiping", "after"),
    ],
}
CANCELS = ["mounting"]


def test_a_reboot_of_the_management_in_the_job_loses_nothing(request: pytest.FixtureRequest) -> None:
    owed_over_a_reboot = test_sweep.test_a_reboot_leaves_data_that_is_owed_and_sweep_keeps_it_for_recover
    owed_over_a_reboot(request.getfixturevalue("site"), "n1", "n2")
