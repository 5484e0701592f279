"""Decides how a request speculates on this server, or why it is refused. The edge and the engine both call `resolve`.

Standard library only: the HTTP edge imports this module.
"""

from dataclasses import dataclass, replace

from engine.trees import Growth, Parents, branching, count_nodes
from engine.types import VERIFIERS, DrafterName, InvalidRequest, Typical, Verifier

DEFAULT_SPEC_LENGTH = 5  # drafts per round for a request that names a drafter where the policy never drafts
FOR_PREDICTIONS: tuple[DrafterName, ...] = ("prediction", "cascade")  # the drafters that read the client's guess
FOR_TREES: tuple[Verifier, ...] = ("match", "rejection")  # the verifiers that decide about trees
FOR_GROWTH: tuple[DrafterName, ...] = ("model", "merged")  # the drafters whose trees grow by their own probabilities
FIXED_SHAPES: tuple[DrafterName, ...] = ("prediction", "lookahead")  # the drafters that draw no tree of a given shape


@dataclass(frozen=True, slots=True)
class SpeculationFields:
    """What a request says about its drafts. None: the server's own choice."""

    k: int | None = None  # None: the policy chooses
    max_k: int | None = None
    drafter: DrafterName | None = None
    verifier: Verifier | None = None
    predicted: bool = False  # whether it brings a guess of its output
    lenience: float | None = None
    typical: Typical | None = None
    temperature: float = 1.0
    auto: bool = False  # the policy chooses k even where it never drafts
    # Children of each node of depth 0, 1, …, or what a tree may have that grows by the draft's own probabilities; None:
    # chains
    tree: tuple[int, ...] | Growth | None = None

    @property
    def lossy(self) -> bool:
        return self.lenience is not None or self.typical is not None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server can do for a request's drafts, and what it does for a request that says nothing."""

    drafters: tuple[DrafterName, ...]  # those that a request may name
    drafter: DrafterName | None  # for requests that do not say; None: they get no drafts
    verifier: Verifier  # for requests that do not say
    max_spec_length: int  # the largest k; 0 without a drafter
    policy_drafts: bool  # whether the policy ever drafts for requests that do not fix their k
    trees: bool = True  # whether a round may check a tree of drafts


@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request speculates."""

    k: int | None  # None: the policy decides
    k_max: int  # the most that it may get
    drafter: DrafterName | None  # None: it gets no drafts
    verifier: Verifier
    tree: Parents | None = None  # the shape of its drafts, k nodes; None: a chain, or a tree that grows
    tree_depth: int = 0  # of a tree of up to k nodes that grows; 0: it does not


def resolve(fields: SpeculationFields, can: Capabilities, *, strict: bool = False) -> Speculation:
    """Return how a request with these fields speculates.

    Raises InvalidRequest for a wish that this server cannot fulfil, with the field's name as the client knows it.
    strict: also refuses a field that would have no effect, as the HTTP API promises.
    """
    tree = fields.tree
    if tree is not None:
        fields = replace(fields, k=_count_drafts(fields, tree, can))
    _check_k(fields, can)
    if strict:
        _check_effect(fields, can)
    plan = _plan(fields, can)
    if isinstance(tree, Growth):
        plan = replace(plan, tree_depth=tree.depth)
    elif tree is not None:
        plan = replace(plan, tree=branching(tree))
    _check_names(fields, plan, can)
    if tree is not None:
        _check_tree(fields, tree, plan)
    if fields.predicted:
        _check_prediction(fields, plan, can)
    if fields.lossy:
        _check_lossy(fields, plan)
    return plan


def _check_tree(fields: SpeculationFields, tree: tuple[int, ...] | Growth, plan: Speculation) -> None:
    """Raise InvalidRequest if the request's verifier or drafter cannot make such a tree."""
    name = "speculation.tree"
    if plan.verifier not in FOR_TREES:
        raise InvalidRequest(
            f"a tree needs verifier {' or '.join(map(repr, FOR_TREES))}; this request's is {plan.verifier!r}", name
        )
    if plan.drafter in FIXED_SHAPES:
        raise InvalidRequest(
            f"the drafter {plan.drafter!r} draws no tree of a given shape: leave out speculation.tree, or name another "
            "drafter",
            name,
        )
    if not isinstance(tree, Growth):
        return
    if plan.drafter not in FOR_GROWTH:
        raise InvalidRequest(
            f"a tree with nodes and depth grows by a draft model's probabilities, and the drafter {plan.drafter!r} has "
            f"none: name the drafter {' or '.join(map(repr, FOR_GROWTH))}, or give the children by depth, as [3, 2, 1]",
            name,
        )
    if plan.verifier != "match" and fields.temperature:
        raise InvalidRequest(
            f"a tree with nodes and depth depends on the drawn drafts, which verifier {plan.verifier!r} does not allow "
            "at this temperature: use verifier 'match' or temperature 0, or give the children by depth, as [3, 2, 1]",
            name,
        )


def _count_drafts(fields: SpeculationFields, tree: tuple[int, ...] | Growth, can: Capabilities) -> int:
    """The most drafts of a tree. Raises InvalidRequest for one that this server cannot check."""
    name = "speculation.tree"
    if isinstance(tree, Growth):
        given, nodes = f"{{'nodes': {tree.nodes}, 'depth': {tree.depth}}}", tree.nodes
        if not 1 <= tree.depth <= tree.nodes:
            raise InvalidRequest(f"{name} {given} needs a depth between 1 and its nodes", name)
    else:
        given, nodes = str(list(tree)), count_nodes(tree, can.max_spec_length)
        if not tree or any(width < 1 for width in tree):
            raise InvalidRequest(f"{name} {given} must name at least one child for each depth, as [3, 2, 1]", name)
    if not can.trees:
        raise InvalidRequest(f"{name} is not possible on this server, whose results are deterministic", name)
    if fields.k is not None or fields.max_k is not None or fields.auto:
        raise InvalidRequest(f"{name} fixes the drafts of a round: leave out k, max_k and the modes auto and off", name)
    if nodes > can.max_spec_length:
        raise InvalidRequest(f"{name} {given} has more drafts than this server's maximum, {can.max_spec_length}", name)
    return nodes


def _plan(fields: SpeculationFields, can: Capabilities) -> Speculation:
    named = fields.drafter or ("cascade" if fields.predicted else None)
    drafter = named or can.drafter
    k = fields.k
    if k is None and named and not (can.policy_drafts or fields.auto):
        k = DEFAULT_SPEC_LENGTH  # a drafter that a request names drafts for it, whatever the policy
    most = can.max_spec_length if fields.max_k is None else fields.max_k
    k_max = most if k is None else min(k, most)
    if not k_max or drafter is None:
        return Speculation(0, 0, None, fields.verifier or can.verifier)
    return Speculation(None if k is None else k_max, k_max, drafter, fields.verifier or can.verifier)


def _check_k(fields: SpeculationFields, can: Capabilities) -> None:
    if fields.k is not None and fields.max_k is not None:
        _check_range("k", fields.k, can)
        raise InvalidRequest("max_k has no effect unless the policy chooses k (mode 'auto')", "speculation.max_k")
    _check_range("k", fields.k, can)
    _check_range("max_k", fields.max_k, can)


def _check_range(name: str, value: int | None, can: Capabilities) -> None:
    if value is not None and not 0 <= value <= can.max_spec_length:
        raise InvalidRequest(
            f"speculation.{name} {value} does not lie between 0 and this server's maximum, {can.max_spec_length}",
            f"speculation.{name}",
        )


def _check_effect(fields: SpeculationFields, can: Capabilities) -> None:
    """Refuse fields that act on drafts in a request that gets none, and drafter 'prediction' without a prediction."""
    named = fields.drafter is not None or fields.predicted
    quiet = (not can.policy_drafts and (fields.auto or not named)) or (can.drafter is None and not named)
    if fields.k == 0 or (fields.k is None and quiet):
        because = "speculation is off" if fields.k == 0 else "this server by itself drafts nothing"
        idle = {
            "speculation.drafter": fields.drafter is not None,
            "speculation.verifier": fields.verifier is not None,
            "prediction": fields.predicted,
            "lossy": fields.lossy,
        }
        for name, given in idle.items():
            if given:
                raise InvalidRequest(f"{name} has no effect while {because}", name)
    if fields.drafter == "prediction" and not fields.predicted and fields.drafter in can.drafters:
        raise InvalidRequest("the drafter 'prediction' needs a prediction", "speculation.drafter")


def _check_names(fields: SpeculationFields, plan: Speculation, can: Capabilities) -> None:
    if fields.drafter is not None and fields.drafter not in can.drafters:
        has = ", ".join(can.drafters) or "none"
        raise InvalidRequest(f"this server has no drafter {fields.drafter!r}; it has: {has}", "speculation.drafter")
    if fields.verifier is not None and fields.verifier not in VERIFIERS:
        known = ", ".join(VERIFIERS)
        raise InvalidRequest(f"verifier {fields.verifier!r} is not one of {known}", "speculation.verifier")
    if fields.k and plan.drafter is None:
        raise InvalidRequest("no drafter is configured here, and the request names none", "speculation.drafter")


def _check_prediction(fields: SpeculationFields, plan: Speculation, can: Capabilities) -> None:
    if fields.drafter is not None and fields.drafter not in FOR_PREDICTIONS:
        readers = " or ".join(map(repr, FOR_PREDICTIONS))
        raise InvalidRequest(
            f"the drafter {fields.drafter!r} would not look at the prediction, which needs drafter {readers}",
            "prediction",
        )
    if not any(name in can.drafters for name in FOR_PREDICTIONS):
        raise InvalidRequest("this server has no drafter for predictions", "prediction")
    if plan.drafter is None:
        raise InvalidRequest("a prediction needs drafts: k and max_k above 0", "prediction")


def _check_lossy(fields: SpeculationFields, plan: Speculation) -> None:
    """Refuse `lossy` where it would not act, because the reply is labelled as lossy."""
    if fields.lenience is not None and fields.typical is not None:
        raise InvalidRequest("lossy takes lenience or typical, not both", "lossy")
    if fields.lenience is not None and not 0 < fields.lenience < 1:
        raise InvalidRequest("lenience must lie between 0 and 1, both excluded", "lossy.lenience")
    if fields.typical is not None and not 0 < fields.typical.epsilon < 1:
        raise InvalidRequest("epsilon must lie between 0 and 1, both excluded", "lossy.typical.epsilon")
    if fields.typical is not None and not 0 < fields.typical.delta <= 1:
        raise InvalidRequest("delta must be greater than 0 and at most 1", "lossy.typical.delta")
    if plan.verifier != "rejection":
        raise InvalidRequest(f"lossy needs the verifier 'rejection'; this request's is {plan.verifier!r}", "lossy")
    if plan.drafter is None:
        raise InvalidRequest("lossy needs drafts, and this request gets none", "lossy")
    if fields.temperature == 0:
        raise InvalidRequest("lossy needs a temperature above 0", "lossy")
