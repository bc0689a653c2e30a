"""Several machines in one box: hosts as Linux network namespaces on a bridge, for runs over several hosts without them.

Nothing here trains. See README.md beside this file.
"""

from tools.cluster_in_a_box.box import Box, Command, why_impossible
from tools.cluster_in_a_box.link import Link

__all__ = ["Box", "Command", "Link", "why_impossible"]
