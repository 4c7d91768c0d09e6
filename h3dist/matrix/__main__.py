"""The matrix as a Hydra app: `python -m h3dist.matrix`, with --help, --cfg job, or what `h3dist matrix` takes."""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from h3dist.config import conf_dir, register_schema
from h3dist.errors import ConfigError, H3Error
from h3dist.matrix.config import MatrixConfig, matrix_of
from h3dist.matrix.run import run_matrix


@hydra.main(config_path=str(conf_dir()), config_name="matrix", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Run the matrix, and leave with its exit code."""
    try:
        sys.exit(_run(composed))
    except H3Error as error:
        print(f"h3dist: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _run(composed: DictConfig) -> int:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ConfigError("--multirun would run matrices one over the other; a matrix sweeps by itself")
    return run_matrix(*matrix_of(composed, list(HydraConfig.get().overrides.task)))


if __name__ == "__main__":
    register_schema(MatrixConfig)
    main()
