"""GET /health: whether the engine makes progress, its load and its policy. The engine itself judges its health."""

from starlette.requests import Request
from starlette.responses import Response

from app.client import EngineClient
from app.openai.replies import JSON


async def health(client: EngineClient, request: Request) -> Response:
    """Return 200 while the engine is healthy, else 503 with the reason."""
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
