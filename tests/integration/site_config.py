"""The site configuration of the cluster tests: nothing is waited for longer than a test can."""

CONFIG = """
[storage]
kind = "{kind}"
paths = ["/nvme/beeond"]
{more}
[deadlines]
meet = 12
start = 15
stop = 10
silence = 4
[staging]
job_check = 1
"""
