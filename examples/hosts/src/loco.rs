//! loco: its routes are axum's, so the layer goes around a group of them. loco serves with the
//! addresses of the clients, which `key::PeerIp` needs.

use async_trait::async_trait;
use axum::routing::get;
use loco_rs::{
    Result,
    app::{AppContext, Hooks},
    bgworker::Queue,
    boot::{BootResult, StartMode, create_app},
    config::Config,
    controller::{AppRoutes, Routes},
    environment::Environment,
    task::Tasks,
};
use tower_ratelimit::{Quota, RateLimitLayer, key};

use crate::limiter;

/// An application whose routes under `/reports` are limited by address.
pub struct App;

/// Returns a group of routes with one limit: all of them share the counts.
fn reports() -> Routes {
    let limiter = limiter("reports", Quota::per_hour(1));
    Routes::new()
        .prefix("reports")
        .add("/daily", get(async || "the report of the day\n"))
        .add("/weekly", get(async || "the report of the week\n"))
        .layer(RateLimitLayer::new(limiter, key::PeerIp))
}

#[async_trait]
impl Hooks for App {
    fn app_name() -> &'static str {
        "reports"
    }

    fn routes(_: &AppContext) -> AppRoutes {
        AppRoutes::with_default_routes().add_route(reports())
    }

    async fn boot(
        mode: StartMode,
        environment: &Environment,
        config: Config,
    ) -> Result<BootResult> {
        create_app::<Self>(mode, environment, config).await
    }

    async fn connect_workers(_: &AppContext, _: &Queue) -> Result<()> {
        Ok(())
    }

    fn register_tasks(_: &mut Tasks) {}
}
