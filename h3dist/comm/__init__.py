"""Everything that ranks say to each other. The only package that uses torch.distributed."""

from h3dist.comm.comm import Comm
from h3dist.comm.exchange import RankExchange

__all__ = ["Comm", "RankExchange"]
