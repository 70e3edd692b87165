"""First part of every metric key."""

from ..messages import PREFIX as PREFIX
