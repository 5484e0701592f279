"""Why a sequence's k is not larger. Standard library only, because the HTTP edge uses these words too."""

from typing import Literal, get_args

Reason = Literal["policy", "user", "cap", "cache", "acceptance", "load", "probe"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""
policy      the policy gives this k to every sequence, whatever it costs (off, fixed, heuristic), or to all that join
user        its request fixed k, turned speculation off, or set a max_k that prevents more
cap         it may not emit more tokens, its drafter offers no more, or the server allows no more
cache       there is no memory for more
acceptance  more drafts would be rejected too often to pay, even if it ran alone
load        more would pay if it ran alone, but not beside the others of this round
probe       drafts that are not expected to pay, made to learn whether they would
"""
