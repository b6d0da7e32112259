"""People belong to a tenant."""

from __future__ import annotations

from django.contrib.auth.models import AbstractUser
from django.db import models


class Tenant(models.Model):
    """Whose people they are."""

    name = models.CharField(max_length=50)
    allowed = models.BooleanField(default=True)

    class Meta:
        app_label = "tenants"

    def __str__(self) -> str:
        return self.name


class User(AbstractUser):
    """Somebody of a tenant."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, null=True)

    class Meta(AbstractUser.Meta):
        app_label = "tenants"
