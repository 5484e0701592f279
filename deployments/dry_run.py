"""`python -m deployments.launch serve_config.yaml --dry-run`: what a configuration would take, without serving it.

Checkpoints are opened, and those of a hub are downloaded. Only the headers of the weights are read.
"""

from collections.abc import Iterator

from ray.serve.schema import ServeDeploySchema

from deployments.build import available_device
from deployments.config_file import BUILDER
from deployments.settings import Settings
from engine.loading.load import plan_memory


def dry_run(config: ServeDeploySchema) -> Iterator[str]:
    """The name and the memory of each application of ours. Raises ValueError for one that cannot be served."""
    for application in config.applications:
        if application.import_path != BUILDER:
            yield f"application {application.name}: not one of Foretoken"
            continue
        settings = Settings.model_validate(application.args)
        device = available_device() if settings.device == "auto" else settings.device
        yield f"application {application.name}: {settings.name}, one replica:"
        yield str(plan_memory(settings.freeze(device)))
