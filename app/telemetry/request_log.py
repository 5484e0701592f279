"""One line in the log for each request that has ended, unless it was refused. It holds numbers only."""

import logging
from collections.abc import Sequence

from app.telemetry.exchange import CLIENT_DISCONNECT, Exchange
from engine.types import StepStats, acceptance_of

log = logging.getLogger(__name__)


class RequestLog:
    """A listener. app/refusals.py tells of refused requests."""

    def began(self, exchange: Exchange) -> None:
        pass

    def ended(self, exchange: Exchange) -> None:
        assert exchange.finished is not None, "listeners get complete exchanges only"
        seconds = exchange.finished - exchange.began
        if not exchange.requests:
            if exchange.failure == CLIENT_DISCONNECT:
                log.info("%s %s: nothing was generated, %.2f s", exchange.id, CLIENT_DISCONNECT, seconds)
            return
        records, body = exchange.records, exchange.body
        finishes = {output.finish_reason or "cancelled" for output in exchange.outputs}
        totals = [acceptance_of(record) for record in records]
        drafted, accepted = sum(t.drafted for t in totals), sum(t.accepted for t in totals)
        prompts = exchange.requests[:: body.candidates]  # each prompt once for all its choices
        log.info(
            "%s %s: %d + %d tokens, %d of %d drafts accepted, %.2f s%s",
            exchange.id,
            exchange.failure or "/".join(sorted(finishes)),
            sum(len(request.prompt_ids) for request in prompts),
            sum(record.output_tokens for record in records),
            accepted,
            drafted,
            seconds,
            " streamed" if body.stream else "",
        )

    def stepped(self, steps: Sequence[StepStats]) -> None:
        pass
