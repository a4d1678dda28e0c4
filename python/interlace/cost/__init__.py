"""What this machine takes: measures ops, collectives and copies, keeps them, and writes the one file that the cost model reads."""

from interlace.cost.machine import Machine
from interlace.cost.measurements import OpTime, Profile
from interlace.cost.store import Store, StoreError

__all__ = ["Machine", "OpTime", "Profile", "Store", "StoreError"]
