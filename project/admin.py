"""Orders in the admin."""

from typing import TYPE_CHECKING

from django.contrib import admin

from project.models import Order

if TYPE_CHECKING:
    OrderAdminBase = admin.ModelAdmin[Order]
else:
    OrderAdminBase = admin.ModelAdmin


@admin.register(Order)
class OrderAdmin(OrderAdminBase):
    """Change an order here, then ask the `support` agent about it."""

    list_display = ("number", "status", "items")
    list_filter = ("status",)
    search_fields = ("=number",)
