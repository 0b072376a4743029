//! Artifacts: pushed as raw bytes, listed by name and digest.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use compass_shared::api::{ArtifactView, Role};
use compass_shared::ids::{ArtifactName, Digest};
use http_body_util::BodyExt;
use tokio::sync::mpsc;

use super::Shared;
use super::auth::Caller;
use super::errors::unreadable;
use super::upload::drain;
use crate::artifacts::ArtifactError;
use crate::control::{Refusal, RefusalKind};
use crate::events::{Event, now_unix_ms};
use crate::plane::Plane;
use crate::store::records::ArtifactRecord;
use crate::store::scan;

/// The header in which a pusher may announce the SHA-256 it expects.
pub(super) const DIGEST_HEADER: &str = "x-compass-sha256";
/// Chunks between the network and the disk.
const CHUNKS: usize = 8;

pub(super) async fn list(State(plane): Shared) -> Result<Json<Vec<ArtifactView>>, Refusal> {
    let records = scan::<ArtifactRecord>(plane.office.store())?;
    let views = records.into_iter().map(|record| ArtifactView {
        name: record.name,
        digest: record.digest,
        bytes: record.bytes,
    });
    Ok(Json(views.collect()))
}

pub(super) async fn push(
    State(plane): Shared,
    caller: Caller,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<ArtifactView>, Refusal> {
    caller.require(Role::Operator)?;
    let name = ArtifactName::new(name).map_err(unreadable)?;
    let announced = headers
        .get(DIGEST_HEADER)
        .map(|value| value.to_str().unwrap_or_default().parse::<Digest>())
        .transpose()
        .map_err(|error| unreadable(format!("{DIGEST_HEADER}: {error}")))?;
    let (digest, bytes) = receive(&plane, body, announced, expected(&plane, &name)).await?;
    let record = ArtifactRecord {
        digest,
        name: name.clone(),
        bytes,
        pushed_unix_ms: now_unix_ms(),
    };
    let text = format!("pushed, {bytes} bytes, SHA-256 {digest}");
    let event = Event::new("artifact", format!("artifact {name}"), caller.actor(), text);
    let transaction = plane.office.begin().put(&record);
    plane.events.record_durably(event, transaction).await?;
    Ok(Json(ArtifactView {
        name,
        digest,
        bytes,
    }))
}

/// The contents that the catalogue knows under a name.
fn expected(plane: &Plane, name: &ArtifactName) -> Vec<Digest> {
    let entries = plane.configs.catalogue.0.values();
    let choices = entries.flat_map(|entry| &entry.artifacts);
    choices
        .filter(|choice| choice.name == *name)
        .map(|choice| choice.digest)
        .collect()
}

/// Takes the body to disk as it comes, without holding it in memory.
async fn receive(
    plane: &Arc<Plane>,
    mut body: Body,
    announced: Option<Digest>,
    expected: Vec<Digest>,
) -> Result<(Digest, u64), Refusal> {
    let (chunks, mut waiting) = mpsc::channel::<axum::body::Bytes>(CHUNKS);
    let artifacts = plane.artifacts.clone();
    let (whole, is_whole) = tokio::sync::oneshot::channel::<()>();
    let writer = tokio::task::spawn_blocking(move || {
        let mut upload = artifacts.receive()?;
        while let Some(chunk) = waiting.blocking_recv() {
            upload.write(&chunk)?;
        }
        // A body that broke off must not be taken for a shorter one.
        if is_whole.blocking_recv().is_err() {
            return Err(ArtifactError::BrokenOff);
        }
        upload.finish(announced.as_ref(), &expected)
    });
    let mut whole = Some(whole);
    loop {
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data()
                    && chunks.send(data).await.is_err()
                {
                    // The writer has given up; it says why below.
                    break;
                }
            }
            Some(Err(_)) => {
                whole = None;
                break;
            }
            None => break,
        }
    }
    if let Some(whole) = whole {
        let _ = whole.send(());
    }
    drop(chunks);
    let result = writer
        .await
        .map_err(|error| Refusal::new(RefusalKind::Internal, error.to_string()))?;
    if result.is_err() {
        drain(&mut body).await;
    }
    result.map_err(refusal)
}

fn refusal(error: ArtifactError) -> Refusal {
    let kind = match &error {
        ArtifactError::WrongDigest { .. }
        | ArtifactError::NotInCatalogue { .. }
        | ArtifactError::BrokenOff => RefusalKind::Invalid,
        ArtifactError::TooLarge { .. } | ArtifactError::Full { .. } => RefusalKind::TooMuch,
        ArtifactError::Unknown(_) => RefusalKind::NotFound,
        ArtifactError::BeyondEnd { .. } => RefusalKind::Invalid,
        ArtifactError::Disk(_) => RefusalKind::Internal,
    };
    Refusal::new(kind, error.to_string())
}
