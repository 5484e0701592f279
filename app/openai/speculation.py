"""What a request may say about its drafts, and what of it this server can do. All that it says acts, or is refused."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from app.client import ModelCard
from app.openai.fields import Strict, prediction_text
from engine.types import DrafterName, InvalidRequest, Verifier

FOR_PREDICTIONS: tuple[DrafterName, ...] = ("prediction", "cascade")  # the drafters that read the client's guess


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
    asked = speculation or SpeculationOptions()
    k = _k(asked, card)
    _check_max_k(asked, k, card)
    if k == 0:
        _refuse_idle(asked, prediction, lossy, "speculation is off")
    elif k is None and _idle(asked, prediction, card):
        _refuse_idle(asked, prediction, lossy, "this server by itself drafts nothing")
    _check_drafter(asked.drafter, card, prediction)
    if lossy is not None:
        _check_lossy(asked.verifier or card.verifier, temperature)
    return Drafting(
        k,
        asked.max_k,
        asked.drafter,
        asked.verifier,
        None if prediction is None else prediction.content,
        None if lossy is None else lossy.lenience,
    )


def _k(asked: SpeculationOptions, card: ModelCard) -> int | None:
    if asked.mode == "off":
        if asked.k:
            raise InvalidRequest(f"speculation cannot be off and draft k = {asked.k} tokens", "speculation")
        return 0
    if asked.mode == "auto" and asked.k is not None:
        raise InvalidRequest("with mode 'auto' the policy chooses k: max_k can bound it", "speculation.k")
    if asked.mode == "fixed" and asked.k is None:
        raise InvalidRequest("mode 'fixed' needs k", "speculation.k")
    if asked.k is not None and asked.k > card.max_spec_length:
        maximum = card.max_spec_length
        raise InvalidRequest(f"speculation.k {asked.k} exceeds this server's maximum, {maximum}", "speculation.k")
    return asked.k


def _check_max_k(asked: SpeculationOptions, k: int | None, card: ModelCard) -> None:
    if asked.max_k is None:
        return
    if k is not None:
        raise InvalidRequest("max_k has no effect unless the policy chooses k (mode 'auto')", "speculation.max_k")
    if asked.max_k > card.max_spec_length:
        message = f"speculation.max_k {asked.max_k} exceeds this server's maximum, {card.max_spec_length}"
        raise InvalidRequest(message, "speculation.max_k")


def _idle(asked: SpeculationOptions, prediction: Prediction | None, card: ModelCard) -> bool:
    """Whether a request that leaves k to the policy is sure to get no drafts, as things are now."""
    if asked.mode == "auto" and card.policy == "off":
        return True
    # A drafter that is asked for acts, and so does a prediction, also where nobody drafts for those who do not ask.
    return asked.drafter is None and prediction is None and (card.policy == "off" or card.drafter is None)


def _refuse_idle(asked: SpeculationOptions, prediction: Prediction | None, lossy: Lossy | None, because: str) -> None:
    """Raise InvalidRequest for a field that acts on drafts, in a request that has none."""
    idle = {
        "speculation.drafter": asked.drafter,
        "speculation.verifier": asked.verifier,
        "prediction": prediction,
        "lossy": lossy,
    }
    for name, value in idle.items():
        if value is not None:
            raise InvalidRequest(f"{name} has no effect while {because}", name)


def _check_drafter(drafter: DrafterName | None, card: ModelCard, prediction: Prediction | None) -> None:
    if drafter is not None and drafter not in card.drafters:
        raise InvalidRequest(
            f"this server has no drafter {drafter!r}; it has: {', '.join(card.drafters) or 'none'}",
            "speculation.drafter",
        )
    if prediction is None:
        if drafter == "prediction":
            raise InvalidRequest("the drafter 'prediction' needs a prediction", "speculation.drafter")
        return
    if drafter is not None and drafter not in FOR_PREDICTIONS:
        raise InvalidRequest(f"the drafter {drafter!r} would not look at the prediction", "prediction")
    if not any(name in card.drafters for name in FOR_PREDICTIONS):
        raise InvalidRequest("this server has no drafter for predictions", "prediction")


def _check_lossy(verifier: Verifier, temperature: float) -> None:
    if verifier != "rejection":
        raise InvalidRequest(f"lossy needs the verifier 'rejection'; this request's is {verifier!r}", "lossy")
    if temperature == 0:
        raise InvalidRequest("lossy needs a temperature above 0", "lossy")
