"""One line in the log for each request that has ended. It holds numbers only."""

import logging
from collections.abc import Sequence

from app.telemetry.exchange import Exchange
from engine.types import StepStats, acceptance_of

log = logging.getLogger(__name__)


class RequestLog:
    """A listener: one line when a request has ended that the engine had accepted."""

    def began(self, exchange: Exchange) -> None:
        pass

    def ended(self, exchange: Exchange) -> None:
        if not exchange.requests or exchange.finished is None:
            return  # refused: app/refusals.py has said so
        records, body = exchange.records, exchange.body
        finishes = {output.finish_reason or "cancelled" for output in exchange.outputs}
        totals = [acceptance_of(record) for record in records]
        drafted, accepted = sum(t.drafted for t in totals), sum(t.accepted for t in totals)
        prompts = exchange.requests[:: body.n]  # each prompt once for all its choices
        log.info(
            "%s %s: %d + %d tokens, %d of %d drafts accepted, %.2f s%s",
            exchange.id,
            exchange.failure or "/".join(sorted(finishes)),
            sum(len(request.prompt_ids) for request in prompts),
            sum(record.output_tokens for record in records),
            accepted,
            drafted,
            exchange.finished - exchange.began,
            " streamed" if body.stream else "",
        )

    def stepped(self, steps: Sequence[StepStats]) -> None:
        pass
