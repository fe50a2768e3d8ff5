"""The page at `/`: what the server does right now, and a chat to try it. Plain files, served from the
package.
"""

from quickturn.server.dashboard.pages import dashboard_state, page, static_file

__all__ = ["dashboard_state", "page", "static_file"]
