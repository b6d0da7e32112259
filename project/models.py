"""The example's own business: orders that the `support` agent looks up."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models


class Order(models.Model):
    """An order of the example shop."""

    class Status(models.TextChoices):
        PAID = "paid"
        SHIPPED = "shipped"
        DELIVERED = "delivered"

    number = models.PositiveIntegerField(unique=True)
    status = models.CharField(max_length=9, choices=Status, default=Status.PAID)
    items = models.JSONField(default=list)

    class Meta:
        ordering: ClassVar = ["number"]

    def __str__(self) -> str:
        return f"Order {self.number}"

    def as_dict(self) -> dict[str, Any]:
        """The order as agents and browsers see it."""
        return {"number": self.number, "status": self.status, "items": self.items}
