//! Lets the ranks of this launch in and nobody else.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use eaglet_runtime::control::PROTOCOL;
use eaglet_runtime::control::transport::{Accepted, Admit};
use eaglet_runtime::ids::{Generation, Seat};
use ractor::ActorRef;

use super::is_secret;
use super::proxy::ProxyMessage;

/// Which proxy an attaching rank belongs to.
#[derive(Clone, Default)]
pub(super) struct Registry(Arc<Mutex<Proxies>>);

type Proxies = HashMap<(Seat, Generation), ActorRef<ProxyMessage>>;

impl Registry {
    /// Makes a proxy known to the gate.
    pub(super) fn enter(&self, seat: Seat, generation: Generation, proxy: &ActorRef<ProxyMessage>) {
        self.proxies().insert((seat, generation), proxy.clone());
    }

    pub(super) fn proxies(&self) -> std::sync::MutexGuard<'_, Proxies> {
        // The map is never left half changed, so a poisoned lock holds a sound one.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Admits the ranks of this launch and no others.
pub(super) struct Gate {
    pub(super) token: String,
    pub(super) registry: Registry,
}

impl Admit for Gate {
    fn admit(&self, accepted: Accepted) -> Result<(), String> {
        let attach = &accepted.attach;
        if attach.protocol != PROTOCOL {
            return Err(format!(
                "this coordinator speaks protocol {PROTOCOL}, the rank {}",
                attach.protocol
            ));
        }
        if !is_secret(&attach.token, &self.token) {
            return Err("the rank belongs to another launch".to_owned());
        }
        let key = (attach.seat, attach.generation);
        let proxy = self.registry.proxies().get(&key).cloned();
        let Some(proxy) = proxy else {
            return Err(format!(
                "{} has no generation {} now",
                attach.seat, attach.generation
            ));
        };
        proxy
            .cast(ProxyMessage::Admitted(Box::new(accepted)))
            .map_err(|_| "the seat was given to another process".to_owned())
    }
}
