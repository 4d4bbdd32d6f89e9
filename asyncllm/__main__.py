"""``python -m asyncllm``: the same as the ``asyncllm`` command."""

import sys

from asyncllm.cli import main

sys.exit(main())
