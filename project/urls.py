"""Addresses of the example product."""

from django.contrib import admin
from django.contrib.auth import views as auth
from django.urls import include, path

from project import views

urlpatterns = [
    path("", views.home, name="home"),
    path("chat/<slug:agent>/", views.chat, name="chat"),
    path("threads/<uuid:key>/ending/", views.ending, name="ending"),
    path("login/", auth.LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", auth.LogoutView.as_view(), name="logout"),
    path("admin/", admin.site.urls),
    path("agui/", include("aguiapp.urls")),
]
