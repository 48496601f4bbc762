// Backups by upstream's own library, for tests that take this program from BACKUPSTORE_BIN. In a clone of
// https://github.com/longhorn/backupstore:
//
//	mkdir dbs && cp .../scripts/upstream-backup.go dbs/main.go && go build -o backupstore-for-dbs ./dbs
//
// A volume is a folder with a raw file for each snapshot.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/longhorn/backupstore"
	_ "github.com/longhorn/backupstore/s3"
	"github.com/longhorn/backupstore/types"
	_ "github.com/longhorn/backupstore/vfs"
)

type ops struct {
	dir  string
	done chan string
	stop chan struct{}
}

func (o *ops) HasSnapshot(id, v string) bool {
	_, e := os.Stat(filepath.Join(o.dir, id))
	return e == nil
}
func (o *ops) CompareSnapshot(id, cmp, v string, bs int64) (*types.Mappings, error) {
	m := &types.Mappings{BlockSize: bs}
	a, err := os.ReadFile(filepath.Join(o.dir, id))
	if err != nil {
		return nil, err
	}
	var b []byte
	if cmp == "" {
		b = make([]byte, len(a))
	} else if b, err = os.ReadFile(filepath.Join(o.dir, cmp)); err != nil {
		return nil, err
	}
	for at := int64(0); at < int64(len(a)); at += bs {
		if !bytes.Equal(a[at:at+bs], b[at:at+bs]) {
			m.Mappings = append(m.Mappings, types.Mapping{Offset: at, Size: bs})
		}
	}
	return m, nil
}
func (o *ops) OpenSnapshot(id, v string) error { return nil }
func (o *ops) ReadSnapshot(id, v string, start int64, data []byte) error {
	f, err := os.Open(filepath.Join(o.dir, id))
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.ReadAt(data, start)
	return err
}
func (o *ops) CloseSnapshot(id, v string) error { return nil }
func (o *ops) UpdateBackupStatus(id, v string, state string, p int, url string, e string) error {
	if url != "" || e != "" {
		o.done <- url + e
	}
	return nil
}
func (o *ops) OpenVolumeDev(name string) (*os.File, string, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0644)
	return f, name, err
}
func (o *ops) CloseVolumeDev(f *os.File) error { return f.Close() }
func (o *ops) UpdateRestoreStatus(s string, p int, e error) {
	if e != nil {
		o.done <- "error " + e.Error()
	} else if p == 100 {
		o.done <- "restored"
	}
}
func (o *ops) Stop()                      {}
func (o *ops) GetStopChan() chan struct{} { return o.stop }

func fail(err error) {
	if err != nil {
		fmt.Println("ERROR", err)
		os.Exit(1)
	}
}

// mk create DEST VOLUME SNAPDIR SNAP METHOD MODE BLOCKSIZE NAME | restore BACKUPURL FILE [LAST] | inspect URL | list DEST | rm URL
func main() {
	a := os.Args
	o := &ops{done: make(chan string, 1000), stop: make(chan struct{})}
	switch a[1] {
	case "create":
		o.dir = a[4]
		st, err := os.Stat(filepath.Join(o.dir, a[5]))
		fail(err)
		cfg := &backupstore.DeltaBackupConfig{
			BackupName: a[9], DestURL: a[2], DeltaOps: o, ConcurrentLimit: 2,
			Volume:     &backupstore.Volume{Name: a[3], Size: st.Size(), CreatedTime: time.Now().UTC().Format(time.RFC3339), CompressionMethod: a[6], Labels: map[string]string{"k": "<v>&"}},
			Snapshot:   &backupstore.Snapshot{Name: a[5], CreatedTime: time.Now().UTC().Format(time.RFC3339)},
			Labels:     map[string]string{"k": "<v>&"},
			Parameters: map[string]string{"backup-mode": a[7], "backup-block-size": a[8]},
		}
		inc, err := backupstore.CreateDeltaBlockBackup(a[9], cfg)
		fail(err)
		fmt.Println("incremental", strconv.FormatBool(inc), <-o.done)
		time.Sleep(500 * time.Millisecond)
	case "restore":
		cfg := &backupstore.DeltaRestoreConfig{BackupURL: a[2], DeltaOps: o, Filename: a[3], ConcurrentLimit: 2}
		if len(a) > 4 {
			cfg.LastBackupName = a[4]
			fail(backupstore.RestoreDeltaBlockBackupIncrementally(context.Background(), cfg))
		} else {
			fail(backupstore.RestoreDeltaBlockBackup(context.Background(), cfg))
		}
		fmt.Println(<-o.done)
		time.Sleep(500 * time.Millisecond)
	case "inspect":
		i, err := backupstore.InspectBackup(a[2])
		fail(err)
		j, _ := json.MarshalIndent(i, "", "\t")
		fmt.Println(string(j))
	case "inspect-volume":
		i, err := backupstore.InspectVolume(a[2])
		fail(err)
		j, _ := json.MarshalIndent(i, "", "\t")
		fmt.Println(string(j))
	case "list":
		i, err := backupstore.List("", a[2], false)
		fail(err)
		j, _ := json.MarshalIndent(i, "", "\t")
		fmt.Println(string(j))
	case "rm":
		fail(backupstore.DeleteDeltaBlockBackup(a[2]))
	}
}
