"""GET /health: whether the engine makes progress, as the engine itself judges it, and how it drafts."""

from starlette.requests import Request
from starlette.responses import Response

from app.client import EngineClient
from app.openai.replies import JSON


async def health(client: EngineClient, request: Request) -> Response:
    """200 while the engine is healthy, 503 with the reason when it is not."""
    stats = client.stats()
    load = {
        "running": stats.running,
        "waiting": stats.waiting,
        "free_slots": stats.free_slots,
        "kv_used": round(stats.kv_used, 3),
        "steps": stats.steps,
        "policy": dict(client.policy_status()),
    }
    if stats.healthy:
        return JSON({"status": "ok", **load})
    return JSON({"status": "unhealthy", "reason": stats.reason, **load}, 503)
