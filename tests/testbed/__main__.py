"""`python3 -m tests.testbed`: see cli.py."""

import sys

from tests.testbed.cli import main

sys.exit(main())
