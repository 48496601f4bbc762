//! What backups there are: section 7 of `docs/repository.md`.

use super::format::{self, LIST, MANIFEST_LIMIT, Manifest};
use super::keys::Kind;
use super::{AT_ONCE, Id, Repository};
use crate::config::{BackupConfig, Block, LABEL_SIZE, Map, VolumeConfig, block_size_parameter};
use crate::hold::LABEL_HELD;
use crate::names::{BlockName, hex};
use crate::objects::missing;
use dbs_core::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

/// How something is called whose name cannot be read: with the digits of its object.
const DAMAGED: &str = "damaged-";
/// How chunks are compressed, as commands show it.
const METHOD: &str = "lz4";

/// Where a manifest is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    /// What the names say.
    volume: String,
    name: String,
    id: String,
}

impl Place {
    /// From the path below `manifests`.
    fn parse(path: &str) -> Option<Self> {
        let (volume, file) = path.split_once('/')?;
        let (name, id) = file.split_once('-')?;
        [volume, name, id].iter().all(|part| Id::parse(part).is_some()).then(|| Self {
            volume: volume.to_owned(),
            name: name.to_owned(),
            id: id.to_owned(),
        })
    }

    pub fn path(&self) -> String {
        format::path(&format!("manifests/{}/{}-{}", self.volume, self.name, self.id))
    }

    /// What it is called if its name cannot be read.
    fn damaged(&self) -> String {
        format!("{DAMAGED}{}", self.id)
    }
}

/// The digits of something whose name cannot be read.
fn digits(name: &str) -> Option<&str> {
    name.strip_prefix(DAMAGED).filter(|digits| Id::parse(digits).is_some())
}

impl Repository {
    /// Refuses names that are kept for what is damaged.
    pub fn check_new(name: &str) -> Result<()> {
        match digits(name) {
            None => Ok(()),
            Some(_) => Err(Error::invalid(format!("{name} is the name of something damaged"))),
        }
    }

    /// The part of names that tells volumes apart.
    fn tag(&self, volume: &str) -> String {
        digits(volume).map_or_else(|| self.keys.name(&["volume", volume]), str::to_owned)
    }

    fn name_tag(&self, volume: &str, backup: &str) -> String {
        self.keys.name(&["backup", volume, backup])
    }

    /// The manifests of a volume; of one name the one whose id is smallest.
    fn places(&self, volume: &str) -> Result<Vec<Place>> {
        let tag = self.tag(volume);
        let files = self.objects.list(&format::path(&format!("manifests/{tag}")))?;
        let places = files.iter().filter_map(|file| Place::parse(&format!("{tag}/{file}")));
        Ok(first_of_each(places.collect()))
    }

    /// All manifests, of which some may have one name.
    pub(super) fn all_places(&self) -> Result<Vec<Place>> {
        let mut places = Vec::new();
        self.objects.walk(&format::path("manifests"), &mut |path, _| {
            places.extend(Place::parse(path));
            Ok(())
        })?;
        places.sort();
        Ok(places)
    }

    /// A manifest.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`; those of the store.
    pub(super) fn manifest(&self, place: &Place) -> Result<Arc<Manifest>> {
        let path = place.path();
        let known = || self.manifests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(manifest) = known().get(&path) {
            return Ok(Arc::clone(manifest));
        }
        let object = self.objects.get(&path, MANIFEST_LIMIT)?;
        let id = Id::parse(&place.id).ok_or_else(|| missing(&path))?;
        let json = format::open_object(&self.keys, Kind::Manifest, id, &path, &object)?;
        let manifest = Manifest::parse(&path, &json, self.chunk_size)?;
        let (volume, backup) = (&manifest.volume, &manifest.backup);
        if self.keys.name(&["volume", volume]) != place.volume
            || self.name_tag(volume, backup) != place.name
        {
            return Err(format::damaged(&path, "it is the manifest of another backup"));
        }
        let manifest = Arc::new(manifest);
        known().insert(path, Arc::clone(&manifest));
        Ok(manifest)
    }

    /// The manifests at these places, several at once; or what is wrong with them. What is gone is left out.
    pub(super) fn manifests(
        &self,
        places: Vec<Place>,
    ) -> Result<Vec<(Place, Result<Arc<Manifest>>)>> {
        let mut found = Vec::new();
        let read = |place: Place| match self.manifest(&place) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() != ErrorKind::Corrupt => Err(error),
            manifest => Ok(Some((place, manifest))),
        };
        self.each(AT_ONCE, places.into_iter(), read, |done| {
            found.extend(done.flatten());
            Ok(())
        })?;
        Ok(found)
    }

    /// As [`crate::BackupStore::volumes`].
    pub fn volumes(&self) -> Result<Vec<String>> {
        let mut volumes: BTreeMap<String, Vec<Place>> = BTreeMap::new();
        for place in self.all_places()? {
            volumes.entry(place.volume.clone()).or_default().push(place);
        }
        let name = |(tag, places): (String, Vec<Place>)| {
            for place in places {
                match self.manifest(&place) {
                    Ok(manifest) => return Ok(Some(manifest.volume.clone())),
                    Err(error) if error.kind() == ErrorKind::Corrupt => {}
                    // Deleted meanwhile.
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(Some(format!("{DAMAGED}{tag}")))
        };
        let mut found = Vec::new();
        self.each(AT_ONCE, volumes.into_iter(), name, |done| {
            found.extend(done.flatten());
            Ok(())
        })?;
        found.sort();
        Ok(found)
    }

    /// As [`crate::BackupStore::backups`].
    pub fn backups(&self, volume: &str) -> Result<Vec<String>> {
        let found = self.manifests(self.places(volume)?)?;
        let name = |(place, manifest): &(Place, Result<Arc<Manifest>>)| match manifest {
            Ok(manifest) => manifest.backup.clone(),
            Err(_) => place.damaged(),
        };
        let mut names: Vec<_> = found.iter().map(name).collect();
        names.sort();
        Ok(names)
    }

    /// What is known of a volume by its backups.
    ///
    /// # Errors
    /// `NotFound` if it has none; `Corrupt` if none can be read; those of the store.
    pub fn volume(&self, volume: &str) -> Result<VolumeConfig> {
        let (mut manifests, mut held, mut problem) = (Vec::new(), Vec::new(), None);
        for (_, manifest) in self.manifests(self.places(volume)?)? {
            match manifest {
                Ok(manifest) if manifest.labels.contains_key(LABEL_HELD) => held.push(manifest),
                Ok(manifest) => manifests.push(manifest),
                Err(error) => problem = Some(error),
            }
        }
        if manifests.is_empty() {
            manifests = held;
        }
        let last = manifests
            .iter()
            .max_by(|a, b| (&a.created, &a.asked_at).cmp(&(&b.created, &b.asked_at)));
        let first = manifests.iter().map(|manifest| &manifest.asked_at).min();
        match (last, first) {
            (Some(last), Some(first)) => Ok(VolumeConfig {
                created_time: first.clone(),
                last_backup_name: last.backup.clone(),
                last_backup_at: last.asked_at.clone(),
                ..facts(last)
            }),
            _ => Err(problem.unwrap_or_else(|| {
                Error::not_found(format!("no volume {volume} in the repository"))
            })),
        }
    }

    /// What is known of a volume by one of its backups.
    pub fn volume_of(&self, volume: &str, backup: &str) -> Result<VolumeConfig> {
        Ok(facts(&*self.manifest(&self.find(volume, backup)?)?))
    }

    /// Where a backup is.
    ///
    /// # Errors
    /// `NotFound`; those of the store.
    fn find(&self, volume: &str, backup: &str) -> Result<Place> {
        let (name, digits) = (self.name_tag(volume, backup), digits(backup));
        let is = |place: &Place| match digits {
            Some(digits) => place.id == digits,
            None => place.name == name,
        };
        self.places(volume)?.into_iter().find(is).ok_or_else(|| {
            Error::not_found(format!("volume {volume} has no backup {backup} in the repository"))
        })
    }

    /// Whether there is such a backup.
    pub fn has(&self, volume: &str, backup: &str) -> Result<bool> {
        match self.find(volume, backup) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            found => found.map(|_| true),
        }
    }

    /// When the manifest of a backup, or of the newest one, was written.
    pub fn modified(&self, volume: &str, backup: Option<&str>) -> Result<SystemTime> {
        let place = match backup {
            Some(backup) => self.find(volume, backup)?,
            None => self.find(volume, &self.volume(volume)?.last_backup_name)?,
        };
        let stat = self.objects.stat(&place.path())?;
        stat.map(|stat| stat.modified).ok_or_else(|| missing(&place.path()))
    }

    /// The facts of a backup without its chunks.
    pub fn listed(&self, volume: &str, backup: &str) -> Result<BackupConfig> {
        let manifest = self.manifest(&self.find(volume, backup)?)?;
        Ok(self.config(&manifest))
    }

    /// The facts of a backup.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`, also if a list is nowhere; those of the store.
    pub fn backup(&self, volume: &str, backup: &str) -> Result<BackupConfig> {
        let place = self.find(volume, backup)?;
        let manifest = self.manifest(&place)?;
        let names: Vec<BlockName> = manifest.lists().collect();
        let lists = self.lists(&names).map_err(|error| match error.kind() {
            // The backup is there, and is damaged.
            ErrorKind::NotFound => Error::corrupt(format!("backup {backup}: {error}")),
            _ => error.context(format!("backup {backup}")),
        })?;
        let mut config = self.config(&manifest);
        let slots = manifest.size.div_ceil(self.chunk_size) as usize;
        for (index, list) in manifest.lists.iter().enumerate() {
            let Some(bytes) = list.as_ref().and_then(|list| lists.get(&list.0)) else { continue };
            let (ids, _) = bytes.as_chunks::<32>();
            if bytes.len() != LIST.min(slots - index * LIST) * 32 {
                return Err(format::damaged(
                    &place.path(),
                    "a list has another length than its volume",
                ));
            }
            let first = index * LIST;
            let used = ids.iter().enumerate().filter(|(_, id)| **id != [0; 32]);
            config.blocks.extend(used.map(|(at, id)| Block {
                offset: (first + at) as u64 * self.chunk_size,
                name: BlockName::from_bytes(*id),
            }));
        }
        if config.blocks.len() as u64 != manifest.chunks {
            return Err(format::damaged(&place.path(), "its lists have another number of chunks"));
        }
        Ok(config)
    }

    fn config(&self, manifest: &Manifest) -> BackupConfig {
        let mut labels = manifest.labels.clone();
        labels.insert(LABEL_SIZE.to_owned(), manifest.size.to_string());
        let mut config = BackupConfig {
            name: manifest.backup.clone(),
            volume_name: manifest.volume.clone(),
            snapshot_name: manifest.snapshot.clone(),
            snapshot_created_at: manifest.asked_at.clone(),
            created_time: manifest.created.clone(),
            size: manifest.chunks * self.chunk_size,
            labels: Some(labels),
            parameters: Some(block_size_parameter(self.chunk_size)),
            compression_method: METHOD.to_owned(),
            newly_uploaded_data_size: manifest.uploaded,
            ..BackupConfig::default()
        };
        config.set_incremental(manifest.incremental);
        config
    }

    /// Writes the manifest of a backup all of whose chunks and lists are there; returns where.
    ///
    /// # Errors
    /// `Exists`; those of the store.
    pub(super) fn put_manifest(&self, manifest: &Manifest) -> Result<Place> {
        let (volume, backup) = (&manifest.volume, &manifest.backup);
        if self.has(volume, backup)? {
            return Err(exists(volume, backup));
        }
        let id = Id::new()?;
        let place =
            Place { volume: self.tag(volume), name: self.name_tag(volume, backup), id: hex(&id.0) };
        let json = format::encode(manifest)?;
        let object = format::seal_object(&self.keys, Kind::Manifest, id, &json);
        if object.len() as u64 > MANIFEST_LIMIT {
            return Err(Error::invalid("the labels of the backup are too long"));
        }
        let put = self.objects.put(&place.path(), &object);
        // An answer may be lost: what was written all the same is a backup.
        match put {
            Err(error) if !self.objects.stat(&place.path()).is_ok_and(|stat| stat.is_some()) => {
                Err(error)
            }
            _ => Ok(place),
        }
    }

    /// Writes the manifest of a backup once more, under another name and with other labels.
    ///
    /// Its packs stay: each collection reads one of the two manifests at least, if the first one is there when the second
    /// one has been written.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt`; those of the store.
    pub fn hold(&self, volume: &str, backup: &str, name: &str, labels: Map) -> Result<()> {
        let first = self.find(volume, backup)?;
        let manifest = self.manifest(&first)?;
        let copy = Manifest { backup: name.to_owned(), labels, ..Manifest::clone(&manifest) };
        let second = self.put_manifest(&copy)?;
        let kept = self.objects.settle().and_then(|()| match self.objects.stat(&first.path())? {
            Some(_) => Ok(()),
            None => Err(Error::not_found(format!("backup {backup} was deleted meanwhile"))),
        });
        kept.inspect_err(|_| {
            // What stays keeps some space.
            let _ = self.objects.remove(&second.path());
        })
    }

    /// Refuses a manifest that was written beside another one of its name. That may be complete, and its maker told so. If
    /// two are written at once, both may fail.
    pub(super) fn check_alone(&self, place: &Place, manifest: &Manifest) -> Result<()> {
        let (volume, backup) = (&manifest.volume, &manifest.backup);
        let mut others = self.all_of(&place.volume)?.into_iter();
        match others.any(|other| other.name == place.name && other != *place) {
            true => Err(exists(volume, backup)),
            false => Ok(()),
        }
    }

    /// Removes backups; says whether all were there.
    ///
    /// # Errors
    /// Those of the store.
    pub fn remove(&self, volume: &str, backups: &[&str]) -> Result<bool> {
        let tag = self.tag(volume);
        let all: Vec<_> =
            self.all_of(&tag)?.into_iter().map(|place| (place.name.clone(), place)).collect();
        let mut found = true;
        for backup in backups {
            let name = self.name_tag(volume, backup);
            // Those that do not count go too: else they would count from now on.
            let mut places = all
                .iter()
                .filter(|(of, place)| digits(backup).map_or(*of == name, |id| place.id == id))
                .peekable();
            found &= places.peek().is_some();
            places.try_for_each(|(_, place)| self.objects.remove(&place.path()))?;
        }
        self.objects.settle()?;
        Ok(found)
    }

    /// Removes all backups of a volume.
    ///
    /// # Errors
    /// Those of the store.
    pub fn remove_volume(&self, volume: &str) -> Result<()> {
        let places = self.all_of(&self.tag(volume))?;
        places.iter().try_for_each(|place| self.objects.remove(&place.path()))?;
        self.objects.settle()
    }

    fn all_of(&self, tag: &str) -> Result<Vec<Place>> {
        let files = self.objects.list(&format::path(&format!("manifests/{tag}")))?;
        Ok(files.iter().filter_map(|file| Place::parse(&format!("{tag}/{file}"))).collect())
    }
}

fn exists(volume: &str, backup: &str) -> Error {
    let text =
        format!("volume {volume} has a backup {backup} already: choose another name, or delete it");
    Error::new(ErrorKind::Exists, text)
}

/// Of places with one name the one whose id is smallest.
fn first_of_each(mut places: Vec<Place>) -> Vec<Place> {
    places.sort();
    places.dedup_by(|a, b| (&a.volume, &a.name) == (&b.volume, &b.name));
    places
}

fn facts(manifest: &Manifest) -> VolumeConfig {
    VolumeConfig {
        name: manifest.volume.clone(),
        size: manifest.size,
        labels: Some(manifest.labels.clone()),
        created_time: manifest.asked_at.clone(),
        last_backup_name: manifest.backup.clone(),
        last_backup_at: manifest.asked_at.clone(),
        block_count: manifest.chunks,
        compression_method: METHOD.to_owned(),
        ..VolumeConfig::default()
    }
}
