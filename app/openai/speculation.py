"""The fields of a request about its drafts. Every field takes effect or is refused."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag

from app.client import ModelCard
from app.openai.fields import Strict, TextPart, prediction_text
from engine.speculation import SpeculationFields, resolve
from engine.trees import Growth
from engine.types import DrafterName, InvalidRequest, Typical, Verifier


class GrowthOptions(Strict):
    """The limits of a tree that grows by the draft model's own probabilities: drafts in all, and drafts on a path."""

    nodes: Annotated[int, Field(ge=1)]
    depth: Annotated[int, Field(ge=1)]


# A tag in brackets is no part of a parameter's name (request.py).
TreeOptions = Annotated[
    Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=64), Tag("[list]")]
    | Annotated[GrowthOptions, Tag("[object]")],
    Discriminator(lambda value: "[object]" if isinstance(value, dict | GrowthOptions) else "[list]"),
]


class SpeculationOptions(Strict):
    """How to draft, and what to report about it. The server decides what a request leaves out.

    mode "auto": the server's policy chooses k in every round, at most max_k; "fixed": k is fixed; "off": no drafts.
    Without a mode, k means "fixed", and without k the policy chooses.
    tree: the children of each draft by depth; [3, 2] drafts three next tokens and two after each of them. Or
    {"nodes": 7, "depth": 4}: the draft model's own probabilities decide in each round where the tree branches.
    steps: the reply's metrics list every round (replies.py). tokens: its choices list the origin of every token
    (origins.py). Both work in every mode.
    """

    mode: Literal["auto", "off", "fixed"] | None = None
    k: Annotated[int, Field(ge=0)] | None = None
    max_k: Annotated[int, Field(ge=1)] | None = None
    drafter: DrafterName | None = None
    verifier: Verifier | None = None
    tree: TreeOptions | None = None
    steps: bool = False
    tokens: bool = False


class Prediction(Strict):
    """OpenAI's Predicted Outputs: a text that much of the output is expected to repeat."""

    type: Literal["content"]
    content: Annotated[str, PlainValidator(prediction_text, str | list[TextPart])]


class TypicalOptions(Strict):
    """Typical acceptance (Medusa, section 3.3.1): drafts with p > min(epsilon, delta·exp(−entropy of p)) are kept."""

    epsilon: Annotated[float, Field(gt=0, lt=1)]
    delta: Annotated[float, Field(gt=0, le=1)]


class Lossy(Strict):
    """Permission to change the law of the text for speed, in one of two ways. The reply is labelled.

    lenience: Leviathan et al., appendix A.5.
    """

    lenience: Annotated[float, Field(gt=0, lt=1)] | None = None
    typical: TypicalOptions | None = None


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a request says about its drafts, checked."""

    fields: SpeculationFields
    prediction: str | None  # the text that the output is expected to repeat; None: the request expects none


def settle(
    card: ModelCard,
    speculation: SpeculationOptions | None,
    prediction: Prediction | None,
    lossy: Lossy | None,
    temperature: float,
) -> Drafting:
    """Check the fields against this server. Raises InvalidRequest, with its name, for a field that cannot act."""
    options = speculation or SpeculationOptions()
    fields = SpeculationFields(
        k=_k(options),
        max_k=options.max_k,
        drafter=options.drafter,
        verifier=options.verifier,
        predicted=prediction is not None,
        lenience=None if lossy is None else lossy.lenience,
        typical=_typical(lossy),
        temperature=temperature,
        auto=options.mode == "auto",
        tree=_tree(options.tree),
    )
    resolve(fields, card.capabilities, strict=True)
    return Drafting(fields, None if prediction is None else prediction.content)


def _tree(tree: list[int] | GrowthOptions | None) -> tuple[int, ...] | Growth | None:
    if isinstance(tree, GrowthOptions):
        return Growth(tree.nodes, tree.depth)
    return None if tree is None else tuple(tree)


def _k(options: SpeculationOptions) -> int | None:
    """Return the k that mode and k ask for together; None: the policy chooses."""
    if options.mode == "off":
        if options.k:
            raise InvalidRequest(f"speculation cannot be off and draft k = {options.k} tokens", "speculation")
        return 0
    if options.mode == "auto" and options.k is not None:
        raise InvalidRequest("with mode 'auto' the policy chooses k: max_k can bound it", "speculation.k")
    if options.mode == "fixed" and options.k is None and options.tree is None:
        raise InvalidRequest("mode 'fixed' needs k or tree", "speculation.k")
    return options.k


def _typical(lossy: Lossy | None) -> Typical | None:
    """The typical acceptance that `lossy` asks for. Raises InvalidRequest if `lossy` has neither of its fields."""
    if lossy is not None and lossy.lenience is None and lossy.typical is None:
        raise InvalidRequest('lossy must have "lenience" or "typical"', "lossy")
    if lossy is None or lossy.typical is None:
        return None
    return Typical(lossy.typical.epsilon, lossy.typical.delta)
