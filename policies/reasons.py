"""Why a sequence's k is what it is, and no larger. Standard library only: the HTTP edge knows these words too."""

from typing import Literal, get_args

Reason = Literal["policy", "user", "cap", "cache", "acceptance", "load", "probe"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""
policy      the policy gives this k to everybody, whatever it costs (off, fixed, heuristic), or to all who join
user        its request fixed k, turned speculation off, or set a max_k that is in the way
cap         it may not emit more tokens, its drafter offers no more, or the server allows no more
cache       there is no memory for more
acceptance  more drafts would be rejected too often to pay, even if it ran alone
load        more would pay if it ran alone, and do not beside the others of this round; or it has just joined them, and
            in a large batch that is planned for a round later
probe       drafts that are not expected to pay, to learn whether they would
"""
