"""The process that ends a pod which `create` left running: started with the pod, ends with it.

python -m h3dist.cloud.watch NAME SCALE      (the API key comes as one line on standard input)
"""

import os
import sys
import time

from pydantic import SecretStr

from h3dist.cloud.capacity import destroy_all
from h3dist.cloud.client import Client
from h3dist.cloud.failures import CloudError
from h3dist.cloud.keys import Redactor
from h3dist.cloud.lease import Lease, Store
from h3dist.cloud.pace import Pace, Stop
from h3dist.errors import ConfigError


def watch(store: Store, name: str, key: SecretStr, pace: Pace) -> str:
    """Wait until the lease is over or gone, end the pod, and return what happened."""
    while True:
        try:
            lease = store.load(name)
        except ConfigError:
            return "the pod was given back by someone else"
        left = (lease.ends or 0.0) - time.time()
        if left <= 0:
            break
        time.sleep(min(left, 1.0))
    return _end(store, lease, key, pace)


def _end(store: Store, lease: Lease, key: SecretStr, pace: Pace) -> str:
    client = Client(lease.api, key, Redactor(), pace, Stop())
    while True:
        try:
            destroy_all(client, lease.name, lease.pod_id, pace)
            store.close(lease, "its time was up")
            return "its time was up; the pod is ended"
        except CloudError as error:
            print(f"ending {lease.name} failed, trying again: {error}", file=sys.stderr, flush=True)
            time.sleep(pace.poll)


def main() -> None:
    name, scale = sys.argv[1], float(sys.argv[2])
    key = SecretStr(sys.stdin.readline().strip())
    print(watch(Store.default(os.environ), name, key, Pace().scaled(scale)), flush=True)


if __name__ == "__main__":
    main()
