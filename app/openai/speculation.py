"""What a request may say about its drafts, and what of it this server can do. All that it says acts, or is refused."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from app.client import ModelCard
from app.openai.fields import Strict, prediction_text
from engine.speculation import SpeculationFields, resolve
from engine.types import DrafterName, InvalidRequest, Verifier


class SpeculationOptions(Strict):
    """How to draft, the server's own way for what is not said; and what to tell of it.

    mode "auto": the server's policy chooses k in every round, at most max_k; "fixed": k; "off": no drafts. Without a
    mode, k means fixed, and anything else leaves k to the policy. steps: the reply's metrics tell every round (see
    replies.py); tokens: its choices tell where every token came from (see origins.py). Both tell of a text
    without drafts too, so no mode refuses them.
    """

    mode: Literal["auto", "off", "fixed"] | None = None
    k: Annotated[int, Field(ge=0)] | None = None
    max_k: Annotated[int, Field(ge=1)] | None = None
    drafter: DrafterName | None = None
    verifier: Verifier | None = None
    steps: bool = False
    tokens: bool = False


class Prediction(Strict):
    """OpenAI's Predicted Outputs: text that much of the output is expected to equal."""

    type: Literal["content"]
    content: Annotated[str, PlainValidator(prediction_text)]


class Lossy(Strict):
    """Leave to change the law of the text for speed (Leviathan et al., appendix A.5); the response is labelled."""

    lenience: Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a request settles about its drafts; None is the server's own choice, or nothing."""

    k: int | None = None  # None: the policy chooses
    max_k: int | None = None
    drafter: DrafterName | None = None
    verifier: Verifier | None = None
    prediction: str | None = None
    lenience: float | None = None


def settle(
    card: ModelCard,
    speculation: SpeculationOptions | None,
    prediction: Prediction | None,
    lossy: Lossy | None,
    temperature: float,
) -> Drafting:
    """Raises InvalidRequest, naming the field, for what this server lacks and for fields that would have no effect."""
    options = speculation or SpeculationOptions()
    drafting = Drafting(
        _k(options),
        options.max_k,
        options.drafter,
        options.verifier,
        None if prediction is None else prediction.content,
        None if lossy is None else lossy.lenience,
    )
    fields = SpeculationFields(
        k=drafting.k,
        max_k=drafting.max_k,
        drafter=drafting.drafter,
        verifier=drafting.verifier,
        predicted=prediction is not None,
        lenience=drafting.lenience,
        temperature=temperature,
        auto=options.mode == "auto",
    )
    resolve(fields, card.capabilities, strict=True)
    return drafting


def _k(options: SpeculationOptions) -> int | None:
    """The k that mode and k ask for together; None: the policy chooses."""
    if options.mode == "off":
        if options.k:
            raise InvalidRequest(f"speculation cannot be off and draft k = {options.k} tokens", "speculation")
        return 0
    if options.mode == "auto" and options.k is not None:
        raise InvalidRequest("with mode 'auto' the policy chooses k: max_k can bound it", "speculation.k")
    if options.mode == "fixed" and options.k is None:
        raise InvalidRequest("mode 'fixed' needs k", "speculation.k")
    return options.k
